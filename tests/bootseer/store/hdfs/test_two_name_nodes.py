"""An HDFS with one silent NameNode, for which hdfs-native waits as long as it may."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bootseer.errors import UnavailableError
from bootseer.store import open_backend
from bootseer.store.hdfs.backend import HdfsBackend
from bootseer.transfer.attempt import Attempt
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.name_node_relay import NameNodeRelay
from testbed.hdfs.pair import NAME, pair_configuration, write_configuration
from tests.bootseer.store.using import put


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def configure(monkeypatch: pytest.MonkeyPatch, folder: Path, *addresses: str) -> str:
    """Write a configuration with the NameNodes at `addresses`; return the URL."""
    write_configuration(folder, pair_configuration(addresses))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
    return f"hdfs://{NAME}/{folder.parent.name}"


@pytest.mark.hdfs
def test_a_silent_namenode_before_the_active_one(
    hdfs: MiniHdfs, silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = configure(monkeypatch, tmp_path / "conf", silent, urlsplit(hdfs.url).netloc)
    backend = open_backend(url)
    assert isinstance(backend, HdfsBackend)
    put(backend, "a", b"1" * 100_000)
    with backend.create("b") as writer:
        writer.expect_checksums()
        writer.write(b"2" * 100_000)
    backend.join("a", ["b"])
    attempt, buffer = Attempt(), bytearray(200_000)
    attempt.is_checked = True
    reader = backend.open_reader("a", is_checked=True)
    assert reader.blocks
    assert reader.read_into(0, memoryview(buffer), attempt) == 200_000
    assert buffer == b"1" * 100_000 + b"2" * 100_000
    assert backend.space() is not None
    backend.close()


@pytest.mark.hdfs
def test_an_active_namenode_that_falls_silent_is_left(
    hdfs: MiniHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other NameNode is asked after the deadline; at once for calls that are safe to repeat."""
    address = urlsplit(hdfs.url).netloc
    with NameNodeRelay(int(address.rpartition(":")[2])) as relay:
        url = configure(monkeypatch, tmp_path / "conf", relay.address, address)
        backend = open_backend(url + "?deadline_s=8")
        put(backend, "a", b"before")
        put(backend, "b", b"moved")
        relay.fall_silent()
        with ThreadPoolExecutor(3) as pool:
            change = pool.submit(backend.rename, "b", "c")
            question = pool.submit(backend.stat, "a")
            repeated = pool.submit(backend.mkdir, "folder")
            with pytest.raises(UnavailableError, match="not the active one any more"):
                change.result(60)
            assert question.result(60).size_bytes == 6
            repeated.result(60)
        assert backend.stat("folder").is_dir
        assert backend.read("a") == b"before"
        backend.close()


@pytest.mark.hdfs
def test_who_answered_last_is_asked_first(
    hdfs: MiniHdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[socket.socket] = []
    over = threading.Event()

    def be_silent(server: socket.socket) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                came.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(0.1)
        thread = threading.Thread(target=be_silent, args=(server,))
        thread.start()
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        url = configure(monkeypatch, tmp_path / "conf", silent, urlsplit(hdfs.url).netloc)
        backend = open_backend(url + "?deadline_s=12")
        try:
            assert backend.can_join()
            count = len(came)
            assert count
            for number in range(3):
                put(backend, f"{number}", b"x" * 100_000)
            backend.join("0", ["1", "2"])
            assert backend.space() is not None
            assert len(came) == count
        finally:
            over.set()
            thread.join()
            backend.close()
            for connection in came:
                connection.close()
