"""Reads served by the files of this node's fan-out in time, and else by the store."""

import array
import contextlib
import math
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.content_digest import content_digest
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import CorruptError, UnavailableError
from bootseer.fanout import local
from bootseer.fanout.local import (
    HEAD,
    IS_COMING,
    IS_OVER,
    UPDATE,
    SharedObject,
    SharedReads,
    body_bytes,
    can_be_shared,
    decode_request,
    fanout_address,
)
from bootseer.fanout.whole_reads import ANSWER, PRESENT, StartDocuments, read_whole
from bootseer.settings.config import Settings, load_config
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.ranges import Chunk, Priority, plan
from testbed.waiting import pause, wait_for

CHUNK_BYTES, COUNT = 1000, 21
URL = "hdfs://user:secret@namenode/store"
DATA = {key: random.Random(key).randbytes(CHUNK_BYTES * COUNT) for key in ("parts/a", "parts/b")}


def _chunk(key: str, number: int) -> Chunk:
    offset = number * CHUNK_BYTES
    data = DATA[key][offset : offset + CHUNK_BYTES]
    return Chunk(key, offset, CHUNK_BYTES, content_digest(data))


# In turn from two stored objects, as a bundle's frames are.
CHUNKS = [_chunk(key, number) for number in range(COUNT) for key in DATA]


class Store:
    """Store that counts the reads of it."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.lock = threading.Lock()

    def read(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        with self.lock:
            self.read_bytes += len(buffer)
        attempt.put(0, buffer, DATA[key][offset : offset + len(buffer)])
        return len(buffer)


class Host:
    """Fan-out process that takes objects, and brings their chunks when a test says so."""

    def __init__(self, name: bytes, file: int) -> None:
        self.file = file
        self.wanted: SharedObject | None = None
        self.brought = 0
        self.connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(name)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection.makefile("rb") as request:
                head = request.read(HEAD.size)
                self.wanted = decode_request(head, request.read(body_bytes(head)))
            rights = array.array("i", [self.file])
            connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self.connection = connection

    def bring(self, count: int, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        """Bring `count` more chunks."""
        wait_for(lambda: self.connection is not None, "a request")
        assert self.wanted is not None
        for number in range(self.brought, self.brought + count):
            chunk = self.wanted.chunks[number]
            data = DATA[chunk.key][chunk.offset : chunk.end]
            os.pwrite(self.file, change(data), self.wanted.starts[number])
        self.brought += count
        self.tell(IS_COMING)

    def tell(self, state: int) -> None:
        assert self.connection is not None
        trees = ((self.brought + 1) // 2, self.brought // 2)
        self.connection.sendall(UPDATE.pack(state, *trees))

    def close(self) -> None:
        self._listener.close()
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    known = {"HOME": str(tmp_path), "BOOTSEER_CONFIG": "/dev/null"}
    # By this folder tests that run at one time have sockets of their own.
    return load_config({}, {**known, "BOOTSEER_RUN_DIR": str(tmp_path / "run")}).settings


@pytest.fixture
def host(settings: Settings, tmp_path: Path) -> Iterator[Host]:
    with (tmp_path / "object").open("w+b") as file:
        made = Host(fanout_address(settings), file.fileno())
        yield made
        made.close()


class Reading:
    """Reads of all chunks by a start."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store()
        self.reads = SharedReads(settings, self.store.read)
        self.is_shared = self.reads.share(URL, CHUNKS)
        self.fetcher = ChunkFetcher(self.reads.read, deadline_s=20, verify=self._verify)
        self.came: dict[Chunk, bytes] = {}
        self.wrong_count = 0

    def _verify(self, chunk: Chunk, data: memoryview) -> bool:
        is_right = content_digest(data) == chunk.digest
        self.wrong_count += not is_right
        return is_right

    def _deliver(self, chunk: Chunk, data: memoryview) -> None:
        self.came[chunk] = bytes(data)

    def start(self) -> None:
        fetches = plan(CHUNKS, lambda _: False, priority=Priority.PREFETCH, max_fetch_bytes=1)
        self.batch = self.fetcher.submit(fetches, self._deliver)

    def finish(self) -> None:
        self.batch.wait(60)
        assert self.came == {one: DATA[one.key][one.offset : one.end] for one in CHUNKS}


@pytest.fixture
def reading(settings: Settings, host: Host) -> Iterator[Reading]:
    made = Reading(settings)
    assert made.is_shared
    yield made
    made.reads.close()
    made.fetcher.close()


def test_what_the_fan_out_brings_is_not_read_from_the_store(host: Host, reading: Reading) -> None:
    reading.start()
    for _ in range(6):
        host.bring(7)
    reading.finish()
    assert reading.store.read_bytes == 0
    assert reading.reads.shared_bytes == sum(chunk.length for chunk in CHUNKS)
    assert host.wanted == SharedObject(URL, tuple(CHUNKS))


def test_reads_that_wait_for_their_turn_are_not_late(host: Host, reading: Reading) -> None:
    """The wait is longer than a connection may be silent."""
    host.bring(8)
    reading.start()
    wait_for(lambda: len(reading.came) == 8, "the first chunks")
    waited = threading.Event()
    waited.wait(1.5)
    host.bring(34)
    reading.finish()
    assert reading.store.read_bytes == 0


@pytest.mark.parametrize("ends", ["is over", "dies"])
def test_the_store_brings_the_rest(host: Host, reading: Reading, ends: str) -> None:
    reading.start()
    host.bring(10)
    wait_for(lambda: len(reading.came) >= 8, "the first chunks")
    host.tell(IS_OVER) if ends == "is over" else host.close()
    reading.finish()
    assert 0 < reading.store.read_bytes <= sum(chunk.length for chunk in CHUNKS[8:]) + 10_000


def test_an_object_that_is_stuck_is_read_from_the_store(
    host: Host, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_STUCK_S", 0.3)
    reading.start()
    host.bring(4)
    reading.finish()
    assert reading.store.read_bytes > 0


def test_an_object_whose_bytes_come_slowly_is_waited_for(
    host: Host, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node of a start read the store when the first chunk took long, and made it slower."""
    monkeypatch.setattr(local, "_STUCK_S", 1.0)
    reading.start()
    host.bring(4)
    wait_for(lambda: len(reading.came) == 4, "the first chunks")
    for _ in range(20):
        host.tell(IS_COMING)
        pause(0.1)
    host.bring(38)
    reading.finish()
    assert reading.store.read_bytes == 0


def test_a_chunk_far_ahead_is_demanded_from_the_store(
    host: Host, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_NEAR_BYTES", 4 * CHUNK_BYTES)
    monkeypatch.setattr(local, "_NEAR_S", 0.0)
    host.bring(2)
    reading.fetcher.demand(CHUNKS[-1], reading._deliver)
    assert reading.store.read_bytes == CHUNK_BYTES


def test_wrong_bytes_reach_nobody(host: Host, reading: Reading) -> None:
    reading.start()
    host.bring(42, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    reading.finish()
    assert reading.wrong_count > 0


@pytest.mark.parametrize("ends", ["whole", "is over", "dies", "is stuck", "lies"])
def test_a_whole_object_comes_or_is_read_from_the_store(
    settings: Settings,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: str,
) -> None:
    monkeypatch.setattr(local, "_STUCK_S", 0.3)
    chunks = [_chunk("parts/a", number) for number in range(COUNT)]
    found: list[bytes | None] = []
    reader = threading.Thread(target=lambda: found.append(read_whole(settings, chunks)))
    reader.start()
    if ends in ("whole", "lies"):
        host.bring(COUNT, lambda data: data[::-1] if ends == "lies" else data)
    else:
        host.bring(10)
    if ends == "is over":
        host.tell(IS_OVER)
    if ends == "dies":
        host.close()
    reader.join(30)
    assert found == [DATA["parts/a"] if ends == "whole" else None]
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == (ends == "lies")


def test_without_a_fan_out_the_store_is_read(settings: Settings) -> None:
    reading = Reading(settings)
    assert not reading.is_shared
    reading.start()
    reading.finish()
    reading.fetcher.close()
    assert reading.store.read_bytes > 0


# ---- requests ---------------------------------------------------------------------------------


def test_what_can_be_shared() -> None:
    assert can_be_shared(CHUNKS)
    for chunks in ([], [Chunk("a", 0, 1)], [Chunk("a", 0, 1 << 30, bytes(32))]):
        assert not can_be_shared(chunks)


@given(st.data())
def test_a_request_that_is_damaged_is_refused(data: st.DataObject) -> None:
    request = bytearray(SharedObject(URL, tuple(CHUNKS[:3])).encode())
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(request) - 1))
        request[place] = data.draw(st.integers(0, 255))
    try:
        count = body_bytes(bytes(request[: HEAD.size]))
        found = decode_request(bytes(request[: HEAD.size]), bytes(request[HEAD.size :][:count]))
    except (CorruptError, struct.error):
        return
    assert can_be_shared(found.chunks)


class _AwayStore:
    url = "s3://bucket/store"

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        raise UnavailableError("the store is away")


def test_documents_of_a_store_that_is_away_are_asked_for_until_one_does_not_come(
    settings: Settings,
) -> None:
    """Regression: each set-up of a start waited six seconds for the document of its snapshot."""
    answers = [PRESENT + b"one", b"", PRESENT + b"two"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(fanout_address(settings))
        listener.listen()

        def serve() -> None:
            for answer in tuple(answers):
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as request:
                    _, count, _ = HEAD.unpack(request.read(HEAD.size))
                    request.read(count)
                    answers.remove(answer)
                    if answer:
                        connection.sendall(ANSWER.pack(False, len(answer)) + answer)

        threading.Thread(target=serve, daemon=True).start()
        WAIT_BUDGET.limit(60.0, first_answer_s=6.0)
        WAIT_BUDGET.give_up()
        try:
            # The neighbours' store is not away.
            assert StartDocuments(settings, _AwayStore()).read("images/a") == b"one"
            for _ in range(2):
                with pytest.raises(UnavailableError, match="away"):
                    StartDocuments(settings, _AwayStore()).read("images/b")
            assert answers == [PRESENT + b"two"]
        finally:
            WAIT_BUDGET.limit(math.inf)
        assert StartDocuments(settings, _AwayStore()).read("images/b") == b"two"
