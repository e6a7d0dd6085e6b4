"""A file that is kept open is opened again now and then, by one of its readers."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.store.hdfs import reader as hdfs_reader
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.transfer.attempt import Attempt

CONTENT = b"x" * 100


class _File:
    def __len__(self) -> int:
        return len(CONTENT)

    def read_range_stream(self, offset: int, length: int) -> Iterator[bytes]:
        yield CONTENT[offset : offset + length]


class _Client:
    """A NameNode that is silent when a file is opened for the second time."""

    def __init__(self) -> None:
        self.opened_count = 0
        self.is_asked = threading.Event()
        self.released = threading.Event()

    def read(self, path: str) -> _File:
        self.opened_count += 1
        if self.opened_count > 1:
            self.is_asked.set()
            self.released.wait(60)
        return _File()

    def get_file_info(self, path: str) -> Any:
        return SimpleNamespace(
            isdir=False, length=100, blocksize=100, modification_time=1, replication=1
        )


def test_who_opens_a_file_again_holds_up_no_other_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an hour all readers of a file waited for a NameNode, up to the deadline."""
    client = _Client()
    monkeypatch.setattr(HdfsBackend, "client", lambda _: client)
    # The file is due at once, and not again.
    monkeypatch.setattr(hdfs_reader, "OPENED_S", 0.0)
    backend = HdfsBackend("hdfs://127.0.0.1:1/x", deadline_s=100)
    reader = backend.open_reader("f")
    monkeypatch.setattr(hdfs_reader, "OPENED_S", 3600.0)

    def read() -> int:
        return reader.read_into(0, memoryview(bytearray(100)), Attempt())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read)
        try:
            assert client.is_asked.wait(60)
            assert pool.submit(read).result(50) == 100
            assert not first.done()
        finally:
            client.released.set()
        assert first.result(60) == 100
    assert read() == 100
    assert client.opened_count == 2
