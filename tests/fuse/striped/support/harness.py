"""The striped file system driven without a mount, as the kernel would drive it."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, errno_of
from bootseer.fuse.kernel.operations import ROOT_NODE, Caller, SetAttributes
from bootseer.fuse.striped.mounted.file_system import MountedTree
from bootseer.fuse.striped.mounted.journal import Journal, read_journal
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.store.backend import Backend
from bootseer.store.local.backend import LocalBackend

UNIT = 8 * 2**10
CALLER = Caller(0, 0, os.getpid())


def storage_on(
    backend: Backend | Path,
    *,
    unit: int = UNIT,
    count: int = 3,
    memory_bytes: int | None = None,
    deadline_s: float = 20.0,
    grace_s: float = 0.0,
    layout: LayoutKind = "striped",
) -> StripedStorage:
    """Return a small storage that stripes files of a few KiB."""
    if isinstance(backend, Path):
        backend = LocalBackend(backend)
    return StripedStorage(
        backend,
        StripeSettings(unit, count, deadline_s, layout),
        memory_bytes=memory_bytes or 64 * unit,
        grace_s=grace_s,
        thread_count=6,
    )


class Driver:
    """Calls by path (open, read, write, ...) through the Operations of one file system."""

    def __init__(
        self, storage: StripedStorage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = storage
        self.fs = MountedTree(storage, clock=clock)

    def node(self, path: str) -> int:
        node = ROOT_NODE
        for name in path.split("/") if path else ():
            entry = self.fs.lookup(CALLER, node, name.encode())
            assert entry.attributes is not None
            node = entry.attributes.node
        return node

    def parent(self, path: str) -> tuple[int, bytes]:
        directory, _, name = path.rpartition("/")
        return self.node(directory), name.encode()

    def open(self, path: str, flags: int) -> tuple[int, int]:
        """Open as open(2) does, with the kernel's second attempt after ESTALE."""
        for attempt in range(2):
            try:
                node = self.node(path)
            except OSError as error:
                if error.errno != errno.ENOENT or not flags & os.O_CREAT:
                    raise
                parent, name = self.parent(path)
                entry, opened = self.fs.create(CALLER, parent, name, 0o644, flags)
                assert entry.attributes is not None
                return entry.attributes.node, opened.handle
            try:
                return node, self.fs.open(CALLER, node, flags).handle
            except OSError as error:
                if error.errno != errno.ESTALE or attempt:
                    raise
        raise AssertionError("unreachable")

    def pread(self, file: tuple[int, int], offset: int, length: int) -> bytes:
        data = self.fs.read(CALLER, *file, offset, length)
        return bytes(data) if isinstance(data, bytes) else b"".join(bytes(d) for d in data)

    def pwrite(self, file: tuple[int, int], offset: int, data: bytes) -> None:
        assert self.fs.write(CALLER, *file, offset, memoryview(data), 0) == len(data)

    def close(self, file: tuple[int, int]) -> None:
        try:
            self.fs.flush(CALLER, *file)
        finally:
            self.fs.release(*file, 0)

    def write(self, path: str, data: bytes, flags: int = os.O_TRUNC, step: int = 5000) -> None:
        file = self.open(path, os.O_WRONLY | os.O_CREAT | flags)
        start = self.size(path) if flags & os.O_APPEND else 0
        try:
            for at in range(0, len(data), step):
                self.pwrite(file, start + at, data[at : at + step])
        except BaseException:
            self.fs.release(*file, 0)
            raise
        self.close(file)

    def read(self, path: str, step: int = 3000) -> bytes:
        file = self.open(path, os.O_RDONLY)
        result = bytearray()
        try:
            while piece := self.pread(file, len(result), step):
                result += piece
        finally:
            self.close(file)
        return bytes(result)

    def size(self, path: str) -> int:
        return self.fs.getattr(CALLER, self.node(path), None)[0].size_bytes

    def names(self, path: str) -> list[str]:
        node = self.node(path)
        handle = self.fs.opendir(CALLER, node, 0).handle
        found: list[str] = []
        offset = 0
        while entries := self.fs.readdir(CALLER, node, handle, offset, False):
            found += [entry.name.decode() for entry in entries]
            offset = entries[-1].offset
        self.fs.releasedir(node, handle)
        return sorted(found)

    def unlink(self, path: str) -> None:
        self.fs.unlink(CALLER, *self.parent(path))

    def mkdir(self, path: str) -> None:
        self.fs.mkdir(CALLER, *self.parent(path), 0o755)

    def rmdir(self, path: str) -> None:
        self.fs.rmdir(CALLER, *self.parent(path))

    def rename(self, source: str, target: str, flags: int = 0) -> None:
        self.fs.rename(CALLER, *self.parent(source), *self.parent(target), flags)

    def truncate(self, path: str, size: int) -> None:
        """Truncate as truncate(2) does, with the kernel's second attempt after ESTALE."""
        for attempt in range(2):
            try:
                self.fs.setattr(CALLER, self.node(path), SetAttributes(size_bytes=size))
            except OSError as error:
                if error.errno != errno.ESTALE or attempt:
                    raise
            else:
                return


@contextlib.contextmanager
def refused_with(code: int) -> Iterator[None]:
    """Assert that the call in the `with` block fails with this errno, as the kernel sees it."""
    with pytest.raises((BootseerError, OSError)) as caught:
        yield
    assert errno_of(caught.value) == code, caught.value


class Restartable(Driver):
    """Node whose server keeps a journal."""

    def __init__(self, root: Path, *, retry_s: float = 10.0) -> None:
        """Start the node; a journal that could not be written is begun again after `retry_s`."""
        super().__init__(storage_on(root / "backend"))
        path = root / "journal"
        self.journal = Journal(path, retry_s=retry_s)
        self.fs = MountedTree(self.storage, journal=self.journal, inherited=read_journal(path))
