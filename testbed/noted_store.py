"""Backend of `limit+URL?tally=PATH` that also notes the path of each request.

A process opens it if BOOTSEER_TEST_NETWORK names this module.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

from bootseer.demo.limited import LimitedBackend, NetworkLimits
from bootseer.store import open_backend
from bootseer.store.backend import Backend, FileInfo
from bootseer.transfer.attempt import Attempt


def open_limited(url: str, *, deadline_s: float | None = None) -> "_NotedBackend":
    """Return the backend; its tally is the only option."""
    inner, _, query = url.removeprefix("limit+").partition("?")
    (tally,) = parse_qs(query)["tally"]
    limits = NetworkLimits(tally=tally)
    return _NotedBackend(open_backend(inner, deadline_s=deadline_s), limits, deadline_s)


def noted_paths(tally: Path) -> list[str]:
    """Return the path of each request of the processes that share a tally."""
    try:
        return _notes(str(tally)).read_text().splitlines()
    except FileNotFoundError:
        return []


def _notes(tally: str) -> Path:
    return Path(f"{tally}.paths")


class _NotedBackend(LimitedBackend):
    def __init__(self, inner: Backend, limits: NetworkLimits, deadline_s: float | None) -> None:
        super().__init__(inner, limits, deadline_s)
        self._notes = _notes(limits.tally)

    def _note(self, path: str) -> None:
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{path}\n".encode())
        finally:
            os.close(file)

    def stat(self, path: str) -> FileInfo:
        self._note(path)
        return super().stat(path)

    def stat_file(self, path: str) -> FileInfo:
        self._note(path)
        return super().stat_file(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._note(path)
        return super().read(path, offset, length)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        self._note(path)
        return super().read_into(path, offset, buffer, attempt)

    def list(self, path: str) -> Iterator[FileInfo]:
        self._note(path)
        return super().list(path)
