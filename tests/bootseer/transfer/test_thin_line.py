"""Eight nodes that share a slow link all succeed, however long it takes."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

from bootseer.base.content_digest import content_digest
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.ranges import Chunk, Priority, covering
from tests.bootseer.transfer.thin_line import ThinLine

NODES_COUNT = 8
# Twice as fast as silence for each of the nodes' two connections.
RATE = 2 * NODES_COUNT * 16 * 1024
DEADLINE_S = 3.0
CHUNK_BYTES = 72 * 1024
DATA = random.Random(7).randbytes(2 * CHUNK_BYTES)


def test_eight_nodes_that_demand_and_prefetch_over_a_thin_line_all_succeed() -> None:
    """A demand once failed at its deadline although its bytes were arriving."""
    line, view = ThinLine(RATE), memoryview(DATA)

    def read(key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        return line.bring(view[offset : offset + len(buffer)], buffer, attempt)

    chunks = [
        Chunk("object", start, CHUNK_BYTES, content_digest(view[start : start + CHUNK_BYTES]))
        for start in (0, CHUNK_BYTES)
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
