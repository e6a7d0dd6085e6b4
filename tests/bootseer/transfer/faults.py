"""Store in memory whose reads can be scripted to be slow, hang, fail or return wrong bytes."""

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable

from bootseer.base.content_digest import content_digest
from bootseer.transfer.chunks import ChunkFetcher
from bootseer.transfer.policy import Policy
from bootseer.transfer.ranges import Chunk, Fetch, Priority, covering
from testbed.waiting import wait_for

CHUNK_BYTES = 64
COUNT = 64
# Every expected event comes much sooner, also on a busy machine.
LONG_S = 60.0
FAST = Policy(base_s=0.001)
CONTENT = b"".join(hashlib.sha512(bytes([n])).digest() for n in range(COUNT))

Fault = Callable[[bytes], bytes]
"""Called with the right bytes; returns the reader's result, raises, or blocks."""


def chunk(number: int, *, verified: bool = True) -> Chunk:
    offset = number * CHUNK_BYTES
    digest = content_digest(CONTENT[offset : offset + CHUNK_BYTES])
    return Chunk("object", offset, CHUNK_BYTES, digest if verified else None)


def fetch(*numbers: int, priority: Priority = Priority.PREFETCH) -> Fetch:
    return covering([chunk(number) for number in numbers], priority)


class FaultyReader:
    """Reader whose next reads have the faults in `script`; later reads have none."""

    def __init__(self) -> None:
        self.script: deque[Fault] = deque()
        self.always: Fault | None = None
        self.reads: list[tuple[int, int]] = []
        self.chunk_reads: Counter[int] = Counter()
        self.concurrent_twice = False
        self._reading: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, key: str, offset: int, length: int) -> bytes:
        assert key == "object"
        numbers = range(offset // CHUNK_BYTES, (offset + length) // CHUNK_BYTES)
        with self._lock:
            self.reads.append((offset, length))
            self.chunk_reads.update(numbers)
            self._reading.update(numbers)
            self.concurrent_twice |= any(self._reading[n] > 1 for n in numbers)
            fault = self.script.popleft() if self.script else self.always
        try:
            data = CONTENT[offset : offset + length]
            return data if fault is None else fault(data)
        finally:
            with self._lock:
                self._reading.subtract(numbers)


class Cache:
    """Cache that chunks are delivered to; keeps their order, and refuses wrong bytes."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.lock = threading.Lock()

    def deliver(self, piece: Chunk, data: memoryview) -> None:
        assert bytes(data) == CONTENT[piece.offset : piece.offset + piece.length]
        with self.lock:
            self.arrived.append(piece.offset // CHUNK_BYTES)

    def holds(self, piece: Chunk) -> bool:
        return piece.offset // CHUNK_BYTES in self.arrived


def raising(error: Exception) -> Fault:
    def fault(_: bytes) -> bytes:
        raise error

    return fault


def blocking(gate: threading.Event, entered: threading.Event | None = None) -> Fault:
    def fault(data: bytes) -> bytes:
        if entered is not None:
            entered.set()
        gate.wait(LONG_S)
        return data

    return fault


def open_when_joined(fetcher: ChunkFetcher, gate: threading.Event) -> threading.Thread:
    """Start a thread that sets `gate` once a request waits for another request's chunk."""

    def wait() -> None:
        wait_for(lambda: fetcher.statistics().joined_count or gate.is_set(), interval_s=0.001)
        gate.set()

    opener = threading.Thread(target=wait)
    opener.start()
    return opener


def blocking_first(gate: threading.Event) -> Fault:
    """Return a fault that blocks the first read of each chunk, with the chunks read in the same
    row."""
    seen: set[int] = set()

    def fault(data: bytes) -> bytes:
        first = CONTENT.index(data) // CHUNK_BYTES
        numbers = set(range(first, first + len(data) // CHUNK_BYTES))
        if not numbers & seen:
            seen.update(numbers)
            gate.wait(LONG_S)
        return data

    return fault


def corrupt(data: bytes) -> bytes:
    """Return the chunks with one bit of each flipped."""
    return bytes(byte ^ (n % CHUNK_BYTES == 0) for n, byte in enumerate(data))


def short(data: bytes) -> bytes:
    return data[:-1]
