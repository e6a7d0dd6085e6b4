"""Has the kernel read what a start is about to want, before it asks.

What the bundle has brought lies in the node's cache, but each first touch of a name or page would
still be a request that the start waits for. So a helper opens the hot files of the new mount, in
the order of use, lists their folders, and has the kernel read their hot pages ahead, while the
start still loads.

Alone decides what is read ahead, and owns the helper: a process, because who waits for the mount
must not be part of what serves it; a server that is killed while a thread of its own waits for it
could not end. It ends when it is let go of, with the server, or after two minutes. It is a help,
never a condition, and silent about what goes wrong. `PageWarmer`: any thread.
"""

import contextlib
import mmap
import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from bootseer.blob.tree import Tree
from bootseer.prefetch import namespaces
from bootseer.prefetch.bundle import BundleExtent, BundleFrame
from bootseer.prefetch.stream_layout import StreamLayout

_PAGE_BYTES = mmap.PAGESIZE
_EXTENT = struct.Struct("=IQQ")
_MESSAGE_BYTES_MAX = 128 * 1024
"""A frame's extents take less, unless somebody cut them very small: those are left out."""
_SO_SNDBUFFORCE = 32
_WAITING_BYTES_MAX = 8 * 2**20
"""What a bundle of gigabytes says before the helper listens."""
_WINDOW_FRAMES = 16
"""8 MiB: sorted by file within so much, by use beyond."""
_ADVICE_BYTES = 128 * 1024
"""Linux reads no more ahead for one call."""
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIFE_S = 120.0
_LISTED_NAMES_MAX = 256
"""Larger folders are not listed: each of their names would take memory of the kernel."""
_MEMORY_SHARE = 4
"""At most this part (1 / 4) of the memory that is free is filled."""


_Piece: TypeAlias = tuple[int, int]
"""Of a file, from a byte to before a byte."""
_Pieces: TypeAlias = dict[int, list[_Piece]]
"""By inode."""


class PageWarmer:
    """A helper process that waits for a mount and for frames. Make it before any thread."""

    def __init__(self, tree: Tree) -> None:
        """Forks. Raises: OSError."""
        self._lock = threading.Lock()
        self._is_mounted = self._has_begun = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):
            # Without root the helper gets no mount anyway.
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _WAITING_BYTES_MAX)
        try:
            child = os.fork()
            if not child:
                _become_helper(tree, theirs)
        except BaseException:
            self.end()
            raise
        finally:
            theirs.close()
        os.waitpid(child, 0)

    def begin(self, directory: Path) -> None:
        """The tree is mounted there. Needs nothing of whoever serves it."""
        with self._lock, contextlib.suppress(OSError):
            # A mount of its own, so that this one can be unmounted meanwhile.
            root = namespaces.open_mount(directory)
            try:
                socket.send_fds(self._socket, [b"m"], [root])
                self._is_mounted = True
            finally:
                os.close(root)

    @property
    def has_begun(self) -> bool:
        """Whether it was given anything to read ahead."""
        return self._has_begun

    def frame_is_here(self, frame: BundleFrame) -> None:
        """The cache has all of it. Does not wait: what the helper cannot take is left out."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.send(b"".join(_EXTENT.pack(*extent) for extent in frame.extents))
            self._has_begun = self._is_mounted

    def finish(self) -> None:
        """No frame will follow: the helper ends when it has done all. Idempotent."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Have it end as soon as it can, which takes milliseconds. Idempotent."""
        with self._lock:
            self._socket.close()


def plan_warming(
    layout: StreamLayout, tree: Tree, extents: Iterable[BundleExtent], fragments: _Pieces
) -> _Pieces:
    """inode -> its whole pages that these bytes of streams hold, as few pieces: files in the order
    of use, pages by place. Pure, but that `fragments`, parts of pages that earlier calls have left,
    becomes what this one leaves.

    To read a page of which a part is missing would fetch something cold; and where it is left out,
    the kernel reads around it what no record ever saw.
    """
    found: _Pieces = {}
    for extent in extents:
        for inode, offset, length in layout.files(*extent):
            # A hostile tree may say that a pipe has content: to open that would wait.
            if stat.S_ISREG(tree.mode(inode)):
                found.setdefault(inode, []).append((offset, offset + length))
    for inode, pieces in found.items():
        pieces += fragments.pop(inode, ())
        found[inode], left = _pages(tree.columns.size_bytes[inode], pieces)
        if left:
            fragments[inode] = left
    return found


def _pages(size_bytes: int, pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    """Whole pages, and what is left."""
    joined: list[_Piece] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    pages, left = [], []
    for start, end in joined:
        first = start + -start % _PAGE_BYTES
        last = end if end == size_bytes else end - end % _PAGE_BYTES
        if first < last:
            pages.append((first, last))
            left += [piece for piece in ((start, first), (last, end)) if piece[0] < piece[1]]
        else:
            left.append((start, end))
    return pages, left


# ---- the helper -----------------------------------------------------------------------------


def _become_helper(tree: Tree, source: socket.socket) -> None:
    """Never returns. Twice forked: whoever made us has nobody to wait for."""
    try:
        if not os.fork():
            _close_all_but(source.fileno())
            with contextlib.suppress(OSError):
                _Helper(tree, source).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Above all the lock that says that a server lives, and the pipe for its report."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) not in (0, 1, 2, kept):
                os.close(int(name))


class _Helper:
    def __init__(self, tree: Tree, source: socket.socket) -> None:
        self._tree = tree
        self._layout = StreamLayout(tree)
        self._source = source
        self._poll = select.poll()
        self._poll.register(source, 0)
        self._until_s = time.monotonic() + _LIFE_S
        self._listed: set[int] = set()

    def run(self) -> None:
        self._source.settimeout(_LIFE_S)
        # While nothing is mounted yet.
        for blob in range(len(self._tree.blobs)):
            self._layout.of(blob)
        _, descriptors, _, _ = socket.recv_fds(self._source, 1, 1)
        if not descriptors:
            return
        self._root = descriptors[0]
        self._room_bytes = _available_bytes() // _MEMORY_SHARE
        fragments: _Pieces = {}
        while (extents := self._receive()) and self._room_bytes > 0:
            planned = plan_warming(self._layout, self._tree, extents, fragments)
            for inode, pages in planned.items():
                if self._is_let_go() or time.monotonic() > self._until_s:
                    return
                with contextlib.suppress(OSError):
                    self._read_ahead(inode, pages)

    def _receive(self) -> list[BundleExtent]:
        """Of all frames that are here now, after a wait for the first; empty after the last."""
        extents: list[BundleExtent] = []
        for count in range(_WINDOW_FRAMES):
            flags = socket.MSG_DONTWAIT if count else 0
            try:
                message = self._source.recv(_MESSAGE_BYTES_MAX, flags)
            except BlockingIOError:
                break
            if not message:
                break
            whole = len(message) - len(message) % _EXTENT.size
            extents += [BundleExtent(*one) for one in _EXTENT.iter_unpack(message[:whole])]
        return extents

    def _is_let_go(self) -> bool:
        """Whether the other end is closed, and not only finished."""
        return any(events & select.POLLHUP for _, events in self._poll.poll(0))

    def _list(self, inode: int) -> None:
        """Have the kernel know all names beside a file, and in the folders above."""
        directories = []
        while inode and (inode := self._tree.parent(inode)) not in self._listed:
            self._listed.add(inode)
            directories.append(inode)
        for directory in reversed(directories):
            if len(self._tree.children(directory, 0, _LISTED_NAMES_MAX + 1)) <= _LISTED_NAMES_MAX:
                path = self._tree.path(directory) or b"."
                file = os.open(path, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=self._root)
                try:
                    os.listdir(file)
                finally:
                    os.close(file)

    def _read_ahead(self, inode: int, pages: list[_Piece]) -> None:
        self._list(inode)
        file = os.open(self._tree.path(inode), _OPEN_FLAGS, dir_fd=self._root)
        try:
            for first, end in pages:
                self._room_bytes -= end - first
                for start in range(first, end, _ADVICE_BYTES):
                    count = min(_ADVICE_BYTES, end - start)
                    os.posix_fadvise(file, start, count, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)


def _available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
