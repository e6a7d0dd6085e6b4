"""Executors of a scripted store, which end with their test."""

import threading
from collections.abc import Callable, Iterator

import pytest

from bootseer.transfer.chunks import ChunkFetcher
from tests.bootseer.transfer.faults import FAST, LONG_S, Cache, FaultyReader
from tests.support.ranged import as_reader


@pytest.fixture
def reader() -> FaultyReader:
    return FaultyReader()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event that is set at the end of the test, so that no blocked reader outlives it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(reader: FaultyReader, gate: threading.Event) -> Iterator[Callable[..., ChunkFetcher]]:
    made: list[ChunkFetcher] = []
    before = set(threading.enumerate())

    def build(**options: object) -> ChunkFetcher:
        settings: dict[str, object] = {"policy": FAST, "deadline_s": LONG_S, **options}
        made.append(ChunkFetcher(as_reader(reader), **settings))  # type: ignore[arg-type]
        return made[-1]

    yield build
    gate.set()
    for fetcher in made:
        fetcher.close()
    left = set(threading.enumerate()) - before
    assert not [thread.name for thread in left if thread.name.startswith("bootseer-")]
