"""Gives the kernel the names and pages of a bundle before a start asks for them one by one.

A start that is replayed asks for a few kilobytes at a time, and waits for each answer while another
processor has nothing to do. So a process beside this one looks the names up (`name_walk`), and the
pages that come next in the bundle go into the kernel's page cache (`PreloadWindow` says how many).
They are noted as if they had been asked for.

A help, never a condition: what is not handed over, the kernel asks for. Alone decides what is.
Threading: `touched` from any thread; two threads of its own, which `stop` lets end.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Buffer
from bootseer.linux.processes import KILLED_S
from bootseer.prefetch.bundle import name_walk
from bootseer.prefetch.bundle.preload_plan import PreloadPlan, PreloadWindow
from bootseer.prefetch.index.stream_contents import Pages

_log = logging.getLogger(__name__)

_WALK_S = 5.0
"""Until the process that looks names up is ended. While it lives, the mount is in use."""
_LATE_S = 0.05
_LATE_COUNT = 4
"""How often to look whether pages can be handed over by now that could not; after so many in vain,
which come in the order of use, the others are not looked at."""
_PIECE_BYTES = 256 * 1024
_END_S = 5.0
_STOP = -1

StorePages: TypeAlias = Callable[[int, int, Buffer], bool]
"""Puts bytes at an offset of a node into the kernel's page cache; False where it cannot yet."""


class KernelPreload:
    """The preload of one start. Begin with `start`; `stop` it before the caches are closed."""

    def __init__(
        self,
        plan: PreloadPlan,
        get: Callable[[int, int, int], Buffer | None],
        store_pages: StorePages | None,
        note: Callable[[int, int, int], None],
        is_replayed: Callable[[], bool],
    ) -> None:
        """`get(blob, offset, length)` gives bytes of a stream that are here.
        `store_pages(node, offset, data)` is as `Operations` has it, None for names only;
        `note(inode, offset, length)` is told what it took. `is_replayed`: nothing more will come
        into the caches."""
        self._plan = plan
        self._get = get
        self._note = note
        self._is_replayed = is_replayed
        self._window = PreloadWindow(len(plan.pieces))
        self._touched: SimpleQueue[int] = SimpleQueue()
        self._walked = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if store_pages is not None:
            args = (store_pages,)
            self._thread = threading.Thread(
                target=self._hand_over, args=args, name="preload", daemon=True
            )

    def start(self, root: int) -> None:
        """Begin. `root` is the tree's root, open; it is closed when the names are looked up."""
        if self._thread is not None:
            self._thread.start()
        threading.Thread(target=self._walk, args=(root,), name="names", daemon=True).start()

    def touched(self, inode: int, offset: int) -> None:
        """The start reads a file there. Takes a microsecond."""
        if self._thread is None:
            return
        number = self._plan.number_at(inode, offset)
        if number >= 0 and not self._window.is_handed(number):
            self._touched.put(number)

    def stop(self) -> None:
        """The caches are about to be closed: touch them no more. After the last request, or it
        takes a while. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._touched.put(_STOP)
            self._thread.join(_END_S)

    # ---- names ----------------------------------------------------------------------------

    def _walk(self, root: int) -> None:
        command = [sys.executable, "-I", "-S", name_walk.__file__, str(root)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[root],
                cwd="/",
            )
            os.close(root)
            root = -1
            try:
                process.communicate(b"\0".join(self._plan.names), timeout=_WALK_S)
            except subprocess.TimeoutExpired:
                process.kill()
                # It may wait for a file system that does not answer: nobody waits for it.
                process.wait(KILLED_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.debug("the names of a bundle are not looked up before the start asks: %s", error)
        finally:
            if root >= 0:
                os.close(root)
            self._walked.set()

    # ---- pages ----------------------------------------------------------------------------

    def _hand_over(self, store_pages: StorePages) -> None:
        late: list[Pages] = []
        try:
            while not self._stopping.is_set():
                try:
                    number = self._touched.get(timeout=_LATE_S if late else None)
                except Empty:
                    # Asked first: what came before is seen below.
                    is_last = self._is_replayed() and self._walked.is_set()
                    late = self._left_of(store_pages, late, len(late) if is_last else _LATE_COUNT)
                    if is_last:
                        late = []
                    continue
                if number != _STOP:
                    wanted = [self._plan.pieces[n] for n in self._window.after(number)]
                    late += self._left_of(store_pages, wanted, len(wanted))
        except (BootseerError, OSError, ValueError) as error:
            _log.debug(
                "the pages of a bundle are not handed to the kernel before the start asks: %s",
                error,
            )

    def _left_of(
        self, store_pages: StorePages, wanted: Sequence[Pages], failures_max: int
    ) -> list[Pages]:
        """Hand over what can be; what is left, also of what is not tried after so many failures."""
        left: list[Pages] = []
        for number, pages in enumerate(wanted):
            if len(left) > failures_max or self._stopping.is_set():
                return left + list(wanted[number:])
            if not self._store(store_pages, pages):
                left.append(pages)
        return left

    def _store(self, store_pages: StorePages, pages: Pages) -> bool:
        """False where they are not here yet, or the kernel does not know the file."""
        for start in range(0, pages.length, _PIECE_BYTES):
            count = min(_PIECE_BYTES, pages.length - start)
            data = self._get(pages.blob, pages.blob_offset + start, count)
            if data is None or not store_pages(pages.inode + 1, pages.file_offset + start, data):
                return False
        self._note(pages.inode, pages.file_offset, pages.length)
        return True
