"""Nodes that share a slow link all succeed, however long it takes."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import digest_of
from bootseer.registry.hosts import RegistryHost
from bootseer.store import open_backend
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.pace import FLOOR_BYTES_PER_S
from bootseer.transfer.ranges import Chunk, Priority, covering
from testbed.servers.starving import AnswerFault, StarvingServer
from tests.bootseer.transfer.thin_line import ThinLine

NODES_COUNT = 8
CONNECTIONS_COUNT = 2 * NODES_COUNT
DEADLINE_S = 3.0
DATA = random.Random(7).randbytes(144 * 1024)


@pytest.mark.parametrize(
    ("share", "chunk_bytes"),
    [(2.0, 72 * 1024), (0.4, 24 * 1024)],
    ids=["above the floor", "below the floor"],
)
def test_eight_nodes_that_demand_and_prefetch_over_a_thin_line_all_succeed(
    share: float, chunk_bytes: int
) -> None:
    """A demand once failed at its deadline although its bytes were arriving.

    Below the floor: sixteen starts behind one line failed since each of their connections got less
    than what counts as bytes.
    """
    line = ThinLine(share * FLOOR_BYTES_PER_S * CONNECTIONS_COUNT)
    view = memoryview(DATA)[: 2 * chunk_bytes]

    def read(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        return line.bring(view[offset : offset + len(buffer)], buffer, attempt)

    chunks = [
        Chunk("object", start, chunk_bytes, content_digest(view[start : start + chunk_bytes]))
        for start in (0, chunk_bytes)
    ]

    def node() -> dict[int, bytes]:
        came: dict[int, bytes] = {}

        def deliver(chunk: Chunk, data: memoryview) -> None:
            came[chunk.offset] = bytes(data)

        with ChunkFetcher(read, threads=1, demand_threads=1, deadline_s=DEADLINE_S) as fetcher:
            batch = fetcher.submit([covering((chunks[1],), Priority.PREFETCH)], deliver)
            fetcher.demand(chunks[0], deliver)
            batch.wait()
        return came

    with ThreadPoolExecutor(NODES_COUNT) as pool:
        for done in [pool.submit(node) for _ in range(NODES_COUNT)]:
            assert done.result() == {one.offset: DATA[one.offset : one.end] for one in chunks}
    assert time.monotonic() - line.began_s > DEADLINE_S, "or the line was not thin"


def test_http_answers_that_come_slower_than_the_floor_are_read_to_their_end() -> None:
    """A start failed by "the registry sends its layer too slowly", over a line full of others."""
    data = DATA[: 24 * 1024]
    digest = digest_of(data)
    slow = AnswerFault(0, trickle_s=0.1, trickle_bytes=512)
    assert slow.trickle_bytes / slow.trickle_s < FLOOR_BYTES_PER_S

    def filled(read: Callable[[memoryview], int]) -> bytes:
        buffer = bytearray(len(data))
        return bytes(buffer[: read(memoryview(buffer))])

    with StarvingServer(data, lambda number, start: slow) as server:
        client = RegistryClient(
            "a/b",
            [RegistryHost(server.host, f"{server.url}/v2")],
            find_login=lambda *_: None,
            deadline_s=DEADLINE_S,
        )
        backend = open_backend(server.url, deadline_s=DEADLINE_S)
        file = client.file(digest, len(data))
        ways: list[Callable[[], bytes]] = [
            lambda: filled(lambda buffer: file.read_into(0, buffer, Attempt())),
            lambda: file.open().read(),
            lambda: backend.read("x", 0, len(data)),
            lambda: filled(lambda buffer: backend.read_into("x", 0, buffer, Attempt())),
        ]
        with ThreadPoolExecutor(len(ways)) as pool:
            for done in [pool.submit(way) for way in ways]:
                assert done.result() == data
        backend.close()
        client.close()
