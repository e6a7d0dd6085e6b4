"""A file that is kept open is opened again now and then, by one of its readers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.store import open_backend
from bootseer.store.hdfs import reading
from bootseer.transfer.attempt import Attempt
from tests.bootseer.store.hdfs.name_nodes import NativeClient, NativeFile, replaced_library


class _Client(NativeClient):
    """NameNode that is silent when a file is opened for the second time."""

    def __init__(self) -> None:
        self.opened_count = 0
        self.is_asked = threading.Event()
        self.released = threading.Event()

    def read(self, path: str) -> NativeFile:
        self.opened_count += 1
        if self.opened_count > 1:
            self.is_asked.set()
            self.released.wait(60)
        return NativeFile(b"x" * 100)

    def get_file_info(self, path: str) -> Any:
        return SimpleNamespace(
            isdir=False, length=100, blocksize=100, modification_time=1, replication=1
        )


def test_who_opens_a_file_again_holds_up_no_other_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an hour, all readers of a file waited for a NameNode, up to the deadline."""
    client = _Client()
    # The file is due at once, and not again.
    monkeypatch.setattr(reading, "OPENED_S", 0.0)
    with replaced_library(monkeypatch, client, "?deadline_s=100") as url:
        reader = open_backend(url).open_reader("f")
        monkeypatch.setattr(reading, "OPENED_S", 3600.0)

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
