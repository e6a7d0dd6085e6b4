"""Backend around a real one that fails as a test says."""

import threading
from collections.abc import Callable, Iterator

from bootseer.errors import BootseerError
from bootseer.store.backend import Backend, FileInfo, Piece, Space, Writer
from bootseer.transfer.attempt import Attempt

Rule = Callable[[str, str], None]
"""Called with (operation, path) before the operation; raises, waits, or does nothing."""


class FaultyBackend(Backend):
    """Backend that calls `rules` before every operation; `corrupt` may change the bytes of a
    read."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.traits = inner.traits
        self.rules: list[Rule] = []
        self.after: list[Rule] = []
        self.corrupt: Callable[[str, int, memoryview], None] = lambda path, offset, data: None
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def note(self, operation: str, path: str) -> None:
        with self._lock:
            self.calls.append((operation, path))
        for rule in list(self.rules):
            rule(operation, path)

    def stat(self, path: str) -> FileInfo:
        self.note("stat", path)
        return self.inner.stat(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.note("read", path)
        data = bytearray(self.inner.read(path, offset, length))
        self.corrupt(path, offset, memoryview(data))
        return bytes(data)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        self.note("read", path)
        count = self.inner.read_into(path, offset, buffer, attempt)
        self.corrupt(path, offset, buffer[:count])
        return count

    def create(self, path: str, *, overwrite: bool = False) -> "_FaultyWriter":
        self.note("create", path)
        return _FaultyWriter(self, path, self.inner.create(path, overwrite=overwrite))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self.note("rename", source)
        self.inner.rename(source, target, overwrite=overwrite)
        for rule in list(self.after):
            rule("rename", source)

    def list(self, path: str) -> Iterator[FileInfo]:
        self.note("list", path)
        return self.inner.list(path)

    def mkdir(self, path: str) -> None:
        self.note("mkdir", path)
        self.inner.mkdir(path)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self.note("delete", path)
        self.inner.delete(path, recursive=recursive)

    def space(self) -> Space | None:
        return self.inner.space()

    def close(self) -> None:
        self.inner.close()


class _FaultyWriter(Writer):
    def __init__(self, backend: FaultyBackend, path: str, inner: Writer) -> None:
        self._backend = backend
        self._path = path
        self._inner = inner

    def write(self, data: Piece) -> None:
        self._backend.note("write", self._path)
        self._inner.write(data)

    def close(self) -> None:
        self._backend.note("close", self._path)
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def abandon(self) -> bool:
        try:
            self._backend.note("abandon", self._path)
        except BootseerError:
            return False
        return self._inner.abandon()

    @property
    def is_buffered(self) -> bool:
        return self._inner.is_buffered

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes


def failing(
    operation: str, error: Callable[[], BaseException], *, within: str = "", times: int = 10**9
) -> Rule:
    """Make the next `times` operations of this kind fail on paths that contain `within`."""
    left = [times]
    lock = threading.Lock()

    def rule(name: str, path: str) -> None:
        with lock:
            hit = name == operation and within in path and left[0] > 0
            if hit:
                left[0] -= 1
        if hit:
            raise error()

    return rule


def hanging(operation: str, released: threading.Event, *, within: str = "") -> Rule:
    """Make operations of this kind wait until `released`, at most a minute."""

    def rule(name: str, path: str) -> None:
        if name == operation and within in path:
            released.wait(60)

    return rule
