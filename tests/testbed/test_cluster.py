"""The HDFS of the tests is real: it loses servers, gets them back, and keeps its data."""

import concurrent.futures
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.errors import DeadlineError, NotFoundError, UnavailableError
from bootseer.store import open_backend, open_store
from bootseer.store.hdfs.native import Native
from testbed.hdfs.classpath import unshade_class
from testbed.hdfs.cluster import MiniHdfs

pytestmark = pytest.mark.hdfs


@pytest.fixture
def whole(hdfs: MiniHdfs) -> Iterator[MiniHdfs]:
    """The session's HDFS; all its servers run again afterwards."""
    yield hdfs
    hdfs.resume()
    hdfs.wait_for_datanodes(hdfs.datanode_count)


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_writing_outlives_a_dead_datanode(whole: MiniHdfs, hdfs_url: str, replication: int) -> None:
    """The NameNode offers a dead DataNode to writers until it notices its death."""
    data = bytes(range(256)) * 1024
    safe = open_store(hdfs_url + "?replication=3")
    safe.publish("kept", data)
    whole.kill_datanode(1)
    try:
        assert safe.read("kept") == data
        with open_store(f"{hdfs_url}?replication={replication}") as store:
            for index in range(4):
                assert store.publish(f"new/{index}", data)
                assert store.read(f"new/{index}") == data
    finally:
        whole.start_datanode(1)
        whole.wait_for_datanodes(3)
    safe.close()


def test_writing_outlives_a_datanode_that_dies_meanwhile(whole: MiniHdfs, hdfs_url: str) -> None:
    backend = open_backend(hdfs_url + "?replication=2&block_size_bytes=8388608")
    pieces = [os.urandom(1 << 20) for _ in range(12)]
    try:
        with backend.create("file") as writer:
            for index, piece in enumerate(pieces):
                if index == 6:
                    whole.kill_datanode(2)
                writer.write(piece)
        assert backend.read("file") == b"".join(pieces)
    finally:
        whole.start_datanode(2)
        whole.wait_for_datanodes(3)
    assert backend.read("file") == b"".join(pieces)
    backend.close()


class _Spoilt:
    """hdfs-native's writer beside a dead DataNode: one fails, another one waits for ever."""

    def __init__(self, gate: threading.Event | None) -> None:
        self._gate = gate

    def write(self, data: bytes) -> None:
        if self._gate is None:
            raise OSError("Connection refused (os error 111)")
        self._gate.wait(60)


def test_writes_that_stall_are_tried_again(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a write that hdfs-native never ended failed at its deadline."""
    create, gate, made = Native.create, threading.Event(), []
    spoilt = {1: _Spoilt(gate), 2: _Spoilt(None), 3: _Spoilt(gate)}

    def create_spoilt(self: Native, path: str, name: str, **options: Any) -> Any:
        made.append(path)
        real = create(self, path, name, **options)
        return spoilt.get(len(made), real)

    monkeypatch.setattr(Native, "create", create_spoilt)
    data = os.urandom(3 << 20)
    backend = open_backend(hdfs_url + "?deadline_s=10")
    try:
        with backend.create("file") as writer:
            writer.write(data)
        assert backend.read("file") == data
        assert len(made) >= 4
    finally:
        gate.set()
        backend.close()


def test_many_blocks_at_once_keep_their_bytes(hdfs: MiniHdfs, hdfs_url: str) -> None:
    """Under load, a NameNode answers NotReplicatedYetException for some of these blocks."""
    backend = open_backend(hdfs_url + "?block_size_bytes=65536")
    data = os.urandom(65536 * 12 + 1)

    def work(index: int) -> bool:
        with backend.create(f"{index}") as writer:
            for start in range(0, len(data), 100_000):
                writer.write(data[start : start + 100_000])
        return backend.read(f"{index}") == data

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    backend.close()


def test_a_file_deleted_under_its_writer_stays_deleted(hdfs: MiniHdfs, hdfs_url: str) -> None:
    backend = open_backend(hdfs_url)
    writer = backend.create("file")
    writer.write(b"x" * 100_000)
    backend.delete("file")
    with pytest.raises(UnavailableError):
        writer.close()
    with pytest.raises(NotFoundError):
        backend.stat("file")
    backend.close()


def test_data_outlives_a_namenode_restart(whole: MiniHdfs, hdfs_url: str) -> None:
    with open_store(hdfs_url) as store:
        store.publish("kept", b"x" * 1000)
        whole.stop_namenode()
        try:
            with (
                open_store(hdfs_url + "?deadline_s=1") as hurried,
                pytest.raises((DeadlineError, UnavailableError)),
            ):
                hurried.read("kept")
        finally:
            whole.start_namenode()
            whole.wait_for_datanodes(3)
        assert store.read("kept") == b"x" * 1000


_FORKING = """
import os, sys, warnings
from bootseer.store import open_store
warnings.simplefilter("ignore")  # the point is to fork with threads about
store = open_store(sys.argv[1] + "?deadline_s=60")
store.publish("parent", b"1")
pid = os.fork()
if pid == 0:
    store.publish("child", b"2")
    os._exit(0 if store.read("parent") == b"1" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert store.read("child") == b"2"
"""


def test_a_forked_child_connects_anew(hdfs: MiniHdfs, hdfs_url: str) -> None:
    subprocess.run([sys.executable, "-c", _FORKING, hdfs_url], check=True, timeout=60)


_LETTING_GO = """
import gc, os, sys, warnings
from bootseer.store import open_store
warnings.simplefilter("ignore")
store = open_store(sys.argv[1])
store.publish("parent", b"1")
pid = os.fork()
if pid == 0:
    del store
    gc.collect()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert store.read("parent") == b"1"
"""


def test_a_forked_child_lets_go_of_its_parents_store(hdfs_url: str) -> None:
    """Regression: the child waited, with the interpreter's lock, for threads of its parent."""
    subprocess.run([sys.executable, "-c", _LETTING_GO, hdfs_url], check=True, timeout=60)


def test_a_server_that_hangs_ends_in_a_deadline_error(whole: MiniHdfs, hdfs_url: str) -> None:
    # No call that must succeed has such a short deadline.
    patient, backend = open_backend(hdfs_url), open_backend(hdfs_url + "?deadline_s=1.5")
    with patient.create("file") as writer:
        writer.write(b"abc")
    buffer = bytearray(b"???")
    whole.pause()
    with pytest.raises(DeadlineError, match="no answer"):
        backend.stat("file")
    with pytest.raises(DeadlineError):
        backend.read("file")
    with pytest.raises(DeadlineError):
        backend.read_into("file", 0, memoryview(buffer))
    with pytest.raises(DeadlineError):
        backend.create("other")
    whole.resume()
    whole.wait_for_datanodes(3)
    # Abandoned reads do not write into the caller's buffer later.
    for _ in range(10):
        assert patient.read("file") == b"abc"
    assert buffer == b"???"
    patient.close()
    backend.close()


def test_unshading_rewrites_the_strings_of_a_class() -> None:
    name = b"org/apache/hadoop/shaded/a/B"
    head = b"\xca\xfe\xba\xbe\x00\x00\x00\x34"
    pool = b"\x05" + bytes(8) + b"\x01" + len(name).to_bytes(2, "big") + name + b"\x07\x00\x03"
    shaded = head + (5).to_bytes(2, "big") + pool + b"rest"
    short = name.removeprefix(b"org/apache/hadoop/shaded/")
    expected_pool = b"\x05" + bytes(8) + b"\x01\x00\x03" + short + b"\x07\x00\x03"
    assert unshade_class(shaded) == head + b"\x00\x05" + expected_pool + b"rest"
    assert unshade_class(b"nothing to do") == b"nothing to do"
