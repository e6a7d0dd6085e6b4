"""Ranges that are late or break off are requested again on another connection.

The second request begins behind the bytes that arrived. The servers are real: HTTP on loopback,
through the registry's client and as a store.
"""

import os
import random
import threading
from collections.abc import Callable

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.errors import CorruptError
from bootseer.http import ranges
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import digest_of
from bootseer.registry.hosts import RegistryHost
from bootseer.store import open_backend
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import ChunkFetcher, Reader
from bootseer.transfer.policy import Policy
from bootseer.transfer.ranges import Chunk, Priority, covering
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.starving import AnswerFault, Choose, StarvingServer

MIB = 2**20
DATA = random.Random(3).randbytes(24 * MIB)
DIGEST = digest_of(DATA)
TRICKLE = AnswerFault(MIB // 2, trickle_s=0.2)
BREAK = AnswerFault(MIB // 2)
SILENCE = AnswerFault(MIB // 2, trickle_s=1000.0)


def client_of(server: StarvingServer) -> RegistryClient:
    host = RegistryHost(server.host, f"{server.url}/v2")
    return RegistryClient(
        "a/b", [host], find_login=lambda *_: None, deadline_s=60, policy=Policy(base_s=0.01)
    )


def by_registry(server: StarvingServer) -> tuple[Reader, Callable[[], None]]:
    client = client_of(server)

    def read(_: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        return client.file(DIGEST, len(DATA)).read_into(offset, buffer, attempt)

    return read, client.close


def by_http(server: StarvingServer) -> tuple[Reader, Callable[[], None]]:
    backend = open_backend(server.url)
    return backend.read_into, backend.close


def once(fault: AnswerFault, start: int) -> Choose:
    """Return a chooser of `fault` for the first answer that begins at `start`."""
    met: list[int] = []

    def choose(number: int, at: int) -> AnswerFault | None:
        if at != start or met:
            return None
        met.append(number)
        return fault

    return choose


def chunk(start: int, end: int) -> Chunk:
    return Chunk("file", start, end - start, content_digest(DATA[start:end]))


@pytest.mark.parametrize("way", [by_registry, by_http])
@pytest.mark.parametrize("fault", [TRICKLE, SILENCE, BREAK], ids=["trickle", "silence", "break"])
def test_a_range_goes_on_behind_the_bytes_that_came(
    way: Callable[[StarvingServer], tuple[Reader, Callable[[], None]]], fault: AnswerFault
) -> None:
    with StarvingServer(DATA, once(fault, 4 * MIB)) as server:
        read, close = way(server)
        found: dict[int, bytes] = {}
        fetches = [
            covering([chunk(start, start + 2 * MIB)], Priority.PREFETCH)
            for start in range(0, len(DATA), 2 * MIB)
        ]
        with ChunkFetcher(read, policy=Policy(base_s=0.01), deadline_s=60) as fetcher:
            fetcher.submit(
                fetches, lambda one, data: found.update({one.offset: bytes(data)})
            ).wait()
            retries = fetcher.statistics().retry_count
        close()
        assert b"".join(found[start] for start in sorted(found)) == DATA
        again = [start for start, end in server.ranges if end == 6 * MIB and start > 4 * MIB]
    assert retries >= 1
    # The bytes before the fault are not requested again.
    assert again
    assert min(again) >= 4 * MIB + MIB // 2
    assert (4 * MIB, 6 * MIB) in server.ranges
    assert server.ranges.count((4 * MIB, 6 * MIB)) == 1


def test_bytes_that_were_resumed_are_verified_as_all_others() -> None:
    """If the bytes of a range were changed, the digest differs, and the whole range is requested
    again."""
    wrong = bytearray(DATA[: 2 * MIB])
    wrong[100] ^= 1
    with StarvingServer(bytes(wrong), once(BREAK, 0)) as server:
        read, close = by_http(server)
        with ChunkFetcher(read, policy=Policy(base_s=0.01)) as fetcher, pytest.raises(CorruptError):
            fetcher.demand(chunk(0, 2 * MIB), lambda one, data: None)
        close()
        assert server.ranges[1][0] == MIB // 2
        assert [start for start, _ in server.ranges[2:]] == [0] * 3


def test_one_starved_range_does_not_hold_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer arrives at once although one of its connections trickles, as in beta9#1876.

    Only the missing bytes of that range are requested again.
    """
    monkeypatch.setattr(ranges, "PART_BYTES", 2 * MIB)
    monkeypatch.setattr(ranges, "FIRST_BYTES", 2 * MIB)
    monkeypatch.setattr(ranges, "LARGE_BYTES", 4 * MIB)
    monkeypatch.setattr(ranges, "FAST_BYTES_PER_S", 1e15)
    with StarvingServer(DATA, once(TRICKLE, 8 * MIB)) as server, client_of(server) as client:
        with client.open(DIGEST, len(DATA)) as file:
            assert file.read() == DATA
        again = [start for start, end in server.ranges if end == 10 * MIB]
    assert again[0] == 8 * MIB
    assert len(again) == 2
    assert again[1] >= 8 * MIB + MIB // 2


@pytest.mark.parametrize("fault", [TRICKLE, SILENCE, BREAK], ids=["trickle", "silence", "break"])
def test_a_layer_over_one_connection_goes_on_over_another(fault: AnswerFault) -> None:
    with (
        StarvingServer(DATA, once(fault, 0)) as server,
        client_of(server) as client,
        client.open(DIGEST, len(DATA)) as file,
    ):
        assert file.read() == DATA
    assert server.ranges[0] == (0, len(DATA))
    (second,) = server.ranges[1:]
    assert second[0] >= MIB // 2


def test_a_late_read_that_ends_first_wins() -> None:
    """The first attempt continues: where the second is no faster, the first one's bytes count."""
    second = threading.Event()
    release = threading.Event()
    reads: list[int] = []

    def read(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        reads.append(offset)
        if len(reads) == 1:
            attempt.put(0, buffer, DATA[: MIB // 4])
            assert second.wait(60)
            attempt.put(MIB // 4, buffer, DATA[MIB // 4 : MIB])
            return len(buffer)
        second.set()
        release.wait(60)
        return 0

    with ChunkFetcher(read, deadline_s=120) as fetcher:
        fetcher.demand(chunk(0, MIB), lambda one, data: None)
        release.set()
    assert reads == [0, MIB // 4]


def test_a_second_read_that_fails_does_not_fail_the_first() -> None:
    failed = threading.Event()
    reads: list[int] = []

    def read(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        reads.append(offset)
        if len(reads) > 1:
            failed.set()
            raise PermissionError("no more connections")
        assert failed.wait(60)
        attempt.put(0, buffer, DATA[:MIB])
        return len(buffer)

    with ChunkFetcher(read, deadline_s=120) as fetcher:
        fetcher.demand(chunk(0, MIB), lambda one, data: None)
    assert reads == [0, 0]


def test_a_range_of_s3_goes_on_behind_the_bytes_that_came(
    moto: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.items():
        monkeypatch.setenv(name, value)
    with open_backend("s3://conformance/late").create("file") as writer:
        writer.write(DATA[: 4 * MIB])
    relay = FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://"))
    with relay:
        relay.faults = [Fault("GET /conformance/late/file", 1, cut_after_bytes=MIB)]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{relay.host}")
        backend = open_backend("s3://conformance/late")
        found: list[bytes] = []
        with ChunkFetcher(backend.read_into, policy=Policy(base_s=0.01)) as fetcher:
            # Nothing of this priority is late: on a busy machine the client takes a second to load.
            whole = covering([chunk(0, 4 * MIB)], Priority.FILL)
            fetcher.submit([whole], lambda one, data: found.append(bytes(data))).wait()
        assert found == [DATA[: 4 * MIB]]
        ranges = [
            one.headers["range"]
            for one in relay.seen
            if one.path.startswith("/conformance/late/file")
        ]
        buffer = memoryview(bytearray(100))
        assert backend.read_into("file", 4 * MIB - 10, buffer, Attempt()) == 10
        assert backend.read_into("file", 5 * MIB, buffer, Attempt()) == 0
    first, second = (int(one.partition("=")[2].partition("-")[0]) for one in ranges)
    assert first == 0
    # The connection's last piece may not have been whole.
    assert 0 < second <= MIB


def test_ranges_of_http_read_as_by_the_whole() -> None:
    data = os.urandom(300_000)
    with StarvingServer(data) as server:
        backend = open_backend(server.url)
        for offset, length in [(0, 10), (1, 299_999), (299_990, 100), (300_000, 5), (400_000, 5)]:
            buffer = bytearray(length)
            count = backend.read_into("file", offset, memoryview(buffer), Attempt())
            assert bytes(buffer[:count]) == data[offset : offset + length]
        backend.close()
