import threading

import pytest

from bootseer.base.parallel import StoppableProgress, WorkStoppedError, map_in_threads


def test_results_have_the_order_of_the_items_and_the_largest_begins_first() -> None:
    begun: list[str] = []

    def work(key: str, size: int) -> int:
        begun.append(key)
        return 2 * size

    found = map_in_threads(
        {"small": 1, "large": 9, "unknown": 0},
        work,
        StoppableProgress(None),
        thread_count=1,
        thread_name="test",
        size_of=lambda size: size or None,
    )
    assert list(found.items()) == [("small", 2), ("large", 18), ("unknown", 0)]
    assert begun == ["large", "small", "unknown"]


def test_a_failure_stops_the_others_and_drops_what_they_made() -> None:
    told: list[int] = []
    progress = StoppableProgress(told.append)
    is_done, is_stopped = threading.Event(), threading.Event()
    dropped: list[str] = []

    def work(key: str, size: int) -> str:
        if key == "done":
            is_done.set()
        elif key == "fails":
            assert is_done.wait(60)
            raise ValueError("broken")
        else:
            progress(size)
            try:
                while True:
                    progress(0)
            except WorkStoppedError:
                is_stopped.set()
                raise
        return key

    with pytest.raises(ValueError, match="broken"):
        map_in_threads(
            {"done": 3, "fails": 2, "goes on": 1, "never begun": 0},
            work,
            progress,
            thread_count=3,
            thread_name="test",
            size_of=lambda size: size,
            drop=dropped.append,
        )
    assert is_stopped.is_set()
    assert dropped == ["done"]
    assert set(told) <= {0, 1}
