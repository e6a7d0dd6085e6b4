"""Preload of a bundle's names and pages into the kernel's caches, ahead of the start.

A replayed start reads a few kilobytes at a time and waits for each answer, while other CPUs are
idle. So `KernelPreload` looks names up in a process beside the server (`name_walk`), and stores the
pages that come next in the bundle into the kernel's page cache. `plan_preload`, which is pure,
turns the extents of a bundle back into names and pages of files, in the order of use.
`PreloadWindow` decides how many pages to store ahead. Stored pages are recorded as if the start had
read them.

A start never depends on the preload: the kernel reads whatever was not stored.
"""

import logging
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeAlias

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError
from bootseer.fuse.kernel.operations import Buffer
from bootseer.linux.processes import KILLED_S
from bootseer.prefetch.bundle import name_walk
from bootseer.prefetch.bundle.format import BundleFrame
from bootseer.prefetch.index.stream_contents import PAGE_BYTES, Pages, StreamContents

_log = logging.getLogger(__name__)

_WALK_S = 5.0
"""Deadline of the process that looks names up. While it lives, the mount is in use."""
_RETRY_S = 0.05
_RETRY_FAILURES_MAX = 4
"""Pages that cannot be stored yet are retried in the order of use; after so many failures the rest
waits for the next round."""
_PIECE_BYTES = 256 * 1024
_END_S = 5.0
_STOP = -1

_LISTED_NAMES_MAX = 1024
_LISTED_SHARE = 8
"""A directory is listed, which takes two requests, instead of looking up each wanted name, if it
has at most `_LISTED_NAMES_MAX` names, or at most `_LISTED_SHARE` for each wanted one."""

_EXTENT_COUNT_MAX = 100_000
"""The most extents of a bundle that are preloaded, in the order of use: far more than a start
needs."""
_WINDOW_MAX = 64
"""The most pieces stored at once: of 20 KB on average, which takes two milliseconds."""
_MARKED_MIN = 8
"""Least number of pieces in a window with a marker: a piece in its middle that is not stored. When
the start reads the marker, the next window is due, and there is time to store it."""

StorePages: TypeAlias = Callable[[int, int, Buffer], bool]
"""Stores bytes at an offset of a node into the kernel's page cache; False if it cannot yet."""


# ---- the plan; pure -----------------------------------------------------------------------------


class PreloadPlan(Struct, frozen=True):
    """Names and pages of a bundle's files, in the order of use."""

    pieces: tuple[Pages, ...]
    """Pages to store."""
    places: dict[int, tuple[list[int], list[int]]]
    """Offsets of the pieces in a file, ascending, and the numbers of the pieces; by inode."""
    names: tuple[bytes, ...]
    """Paths, parents before children. Those that end with a slash are directories to list; the
    others are to be looked up."""

    def number_at(self, inode: int, offset: int) -> int:
        """Return the number of the piece at or before an offset of a file; -1 if there is none."""
        found = self.places.get(inode)
        if found is None:
            return -1
        starts, numbers = found
        return numbers[max(bisect_right(starts, offset) - 1, 0)]


def plan_preload(tree: Tree, frames: Iterable[BundleFrame]) -> PreloadPlan:
    """Return the names and pages of `tree` that `frames` hold. Pure.

    Raises: CorruptError for a tree with impossible contents.
    """
    contents = StreamContents(tree)
    pieces: list[Pages] = []
    extents = (extent for frame in frames for extent in frame.extents)
    run_blob, run_start, run_end = -1, 0, 0
    for blob, offset, length in islice(extents, _EXTENT_COUNT_MAX):
        if blob != run_blob or offset != run_end:
            run_blob, run_start = blob, offset
        run_end = offset + length
        # A frame may end in the middle of a page, whose beginning is in the frame before.
        start = max(run_start, offset - PAGE_BYTES + 1)
        for pages in contents.pages(blob, start, run_end - start):
            if pages.blob_offset + pages.length > offset:
                pieces.append(pages)
    places: dict[int, tuple[list[int], list[int]]] = {}
    for number in sorted(range(len(pieces)), key=lambda number: pieces[number].file_offset):
        starts, numbers = places.setdefault(pieces[number].inode, ([], []))
        starts.append(pieces[number].file_offset)
        numbers.append(number)
    return PreloadPlan(tuple(pieces), places, tuple(_names(tree, pieces)))


def _names(tree: Tree, pieces: Iterable[Pages]) -> Iterator[bytes]:
    """Yield the paths of the pieces' files and of the directories above them."""
    # By directory, in the order of use: the inodes that are wanted in it.
    wanted: dict[int, set[int]] = {}
    for inode in dict.fromkeys(pages.inode for pages in pieces):
        directory = tree.parent(inode)
        if directory not in wanted:
            above = 0
            for number in _directories_to(tree, directory):
                if number:
                    wanted[above].add(number)
                wanted.setdefault(number, set())
                above = number
        wanted[directory].add(inode)
    for directory, inodes in wanted.items():
        first, end = tree.span(directory)
        if end - first <= max(_LISTED_NAMES_MAX, _LISTED_SHARE * len(inodes)):
            yield tree.path(directory) + b"/"
        else:
            yield from map(tree.path, sorted(inodes))


def _directories_to(tree: Tree, directory: int) -> Sequence[int]:
    """Return the directories from the root to `directory`, both included."""
    found = [directory]
    while found[-1]:
        found.append(tree.parent(found[-1]))
    return found[::-1]


class PreloadWindow:
    """Number of pieces that are stored ahead of a start. Not thread-safe.

    The window grows from one piece, as the kernel's own read-ahead does, while pieces are read in
    the order of the bundle. So fewer unneeded pieces are stored than needed ones, and the record of
    the start still shows which parts of the bundle are not needed.
    """

    def __init__(self, count: int) -> None:
        """`count`: number of all pieces."""
        self._count = count
        self._is_stored = bytearray(count)
        self._next = 0
        self._size = 1
        self._marker = -1

    def is_stored(self, number: int) -> bool:
        """Return whether `due_after_read` has returned this piece. Thread-safe."""
        return bool(self._is_stored[number])

    def due_after_read(self, number: int) -> list[int]:
        """Return the pieces to store when the start reads piece `number`, this one first."""
        if self._is_stored[number]:
            return []
        if number == self._marker:
            start = self._next
            self._size = min(2 * self._size, _WINDOW_MAX)
        elif number < self._next:
            # A piece before the window that the start had skipped.
            return self._take([number])
        else:
            start = number + 1
            is_near = number - self._next <= self._size
            self._size = min(2 * self._size, _WINDOW_MAX) if is_near and self._next else 1
        self._next = stop = min(start + self._size, self._count)
        self._marker = (start + stop) // 2 if stop - start >= _MARKED_MIN else -1
        return self._take([number, *(n for n in range(start, stop) if n != self._marker)])

    def _take(self, numbers: list[int]) -> list[int]:
        found = [number for number in numbers if not self._is_stored[number]]
        for number in found:
            self._is_stored[number] = 1
        return found


# ---- carrying the plan out ----------------------------------------------------------------------


class KernelPreload:
    """Preload of one start, in two threads of its own.

    `start` it once; `stop` it before the caches are closed. `touched` may be called by any thread.
    """

    def __init__(
        self,
        plan: PreloadPlan,
        get: Callable[[int, int, int], Buffer | None],
        store_pages: StorePages | None,
        note: Callable[[int, int, int], None],
        is_replayed: Callable[[], bool],
    ) -> None:
        """Prepare the preload.

        `get(blob, offset, length)` returns bytes of a stream, or None if they are absent.
        `store_pages` is `Operations.store_pages`, or None to look up names only.
        `note(inode, offset, length)` is called for stored pages. `is_replayed` returns whether the
        replay has ended, so that no more bytes will come.
        """
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
                target=self._store_ahead, args=args, name="preload", daemon=True
            )

    def start(self, root: int) -> None:
        """Begin. `root` is the open root of the tree; it is closed when all names are looked up."""
        if self._thread is not None:
            self._thread.start()
        threading.Thread(target=self._walk, args=(root,), name="names", daemon=True).start()

    def touched(self, inode: int, offset: int) -> None:
        """Note that the start reads a file at `offset`. Takes a microsecond."""
        if self._thread is None:
            return
        number = self._plan.number_at(inode, offset)
        if number >= 0 and not self._window.is_stored(number):
            self._touched.put(number)

    def stop(self) -> None:
        """Stop using the caches, which are about to be closed. Idempotent.

        Called after the kernel's last request; before that, it may take seconds.
        """
        self._stopping.set()
        if self._thread is not None:
            self._touched.put(_STOP)
            self._thread.join(_END_S)

    def _walk(self, root: int) -> None:
        import subprocess  # here: a mount's first user does not wait for it

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
                # The process may wait for a file system that does not answer.
                process.wait(KILLED_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.debug("the names of a bundle are not looked up before the start asks: %s", error)
        finally:
            if root >= 0:
                os.close(root)
            self._walked.set()

    def _store_ahead(self, store_pages: StorePages) -> None:
        waiting: list[Pages] = []
        try:
            while not self._stopping.is_set():
                try:
                    number = self._touched.get(timeout=_RETRY_S if waiting else None)
                except Empty:
                    # Asked before the retry, which then sees all that came before.
                    is_last = self._is_replayed() and self._walked.is_set()
                    failures_max = len(waiting) if is_last else _RETRY_FAILURES_MAX
                    waiting = self._store_all(store_pages, waiting, failures_max)
                    if is_last:
                        waiting = []
                    continue
                if number != _STOP:
                    due = [self._plan.pieces[n] for n in self._window.due_after_read(number)]
                    waiting += self._store_all(store_pages, due, len(due))
        except (BootseerError, OSError, ValueError) as error:
            _log.debug(
                "the pages of a bundle are not handed to the kernel before the start asks: %s",
                error,
            )

    def _store_all(
        self, store_pages: StorePages, due: Sequence[Pages], failures_max: int
    ) -> list[Pages]:
        """Store pages. Return those that could not be stored, or were not tried.

        No more are tried after more than `failures_max` failures.
        """
        failed: list[Pages] = []
        for number, pages in enumerate(due):
            if len(failed) > failures_max or self._stopping.is_set():
                return failed + list(due[number:])
            if not self._store(store_pages, pages):
                failed.append(pages)
        return failed

    def _store(self, store_pages: StorePages, pages: Pages) -> bool:
        """Return False if the bytes are absent, or the kernel does not know the file yet."""
        for start in range(0, pages.length, _PIECE_BYTES):
            count = min(_PIECE_BYTES, pages.length - start)
            data = self._get(pages.blob, pages.blob_offset + start, count)
            if data is None or not store_pages(pages.inode + 1, pages.file_offset + start, data):
                return False
        self._note(pages.inode, pages.file_offset, pages.length)
        return True
