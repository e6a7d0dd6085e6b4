"""The exerciser's model on hand-made histories: it must find the wrong ones."""

import errno
import os
from typing import Any

import pytest

from tests.fuse.striped.exerciser.model import (
    Answer,
    DeviationError,
    Model,
    Operation,
    content,
    described,
)

UNIT = 1000
SMALL, LARGE = 700, 5 * UNIT + 17
WRITE = os.O_RDWR | os.O_CREAT | os.O_TRUNC
OK: Answer = {"ok": None}


def op(do: str, who: str = "A1", **arguments: Any) -> Operation:
    return {"do": do, "who": who, **arguments}


def shown(data: bytes) -> Answer:
    return {"ok": {"size": len(data), "read": described(data)}}


class History:
    """Model that is given operations with their answers, 10 s apart."""

    def __init__(self) -> None:
        self.model = Model(["A", "B"], UNIT)
        for who in ("A1", "A2", "B1"):
            self.model.begin(who, who[0])
        self.now_s = 0.0

    def see(self, answer: Answer, do: str, who: str = "A1", *, after_s: float = 10.0,
            **arguments: Any) -> None:  # fmt: skip
        self.now_s += after_s
        operation = op(do, who, **arguments)
        assert self.model.permits(operation), operation
        self.model.apply(operation, answer, self.now_s, self.now_s + 0.001)

    def save(self, path: str, seed: int, size: int, slot: str = "saved", who: str = "A1") -> bytes:
        self.see(OK, "open", who, slot=slot, path=path, flags=WRITE)
        if size:
            written = {"ok": size}
            self.see(written, "write", who, slot=slot, offset=0, size=size, seed=seed)
        self.see(OK, "close", who, slot=slot)
        return content(seed, size)


@pytest.fixture
def history() -> History:
    return History()


def deviates() -> Any:
    return pytest.raises(DeviationError)


def test_what_is_right_is_taken_for_right(history: History) -> None:
    old = history.save("a", 1, LARGE)
    history.see(OK, "open", "B1", slot="r", path="a", flags=os.O_RDONLY)
    history.see({"ok": len(old)}, "map", "B1", slot="r", new="m")
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=2)
    history.see(OK, "spawn", inherits=True)
    history.see(shown(old), "peek", "B1", path="a")
    history.see(shown(old), "peek", "A2", path="a")
    history.see({"ok": SMALL}, "fstat", slot="w")
    history.see({"ok": described(content(2, SMALL))}, "read", slot="w", offset=0, length=9999)
    history.see(OK, "close", slot="w")
    history.see(shown(content(2, SMALL)), "peek", "B1", path="a")
    history.see({"ok": described(old)}, "look", "B1", slot="m", offset=0, length=9999)
    history.see({"ok": ["a"]}, "list", "B1", path="")


def test_half_a_file_on_another_node_is_found(history: History) -> None:
    history.save("a", 1, LARGE)
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=2)
    history.see(OK, "fork", child="A1.1")
    history.see(OK, "close", "A1.1", slot="w")
    with deviates():
        history.see(shown(content(2, SMALL)), "peek", "B1", path="a")


def test_what_a_killed_writer_leaves_is_found(history: History) -> None:
    history.save("a", 1, LARGE)
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=2)
    history.see(OK, "kill")
    with deviates():
        history.see(shown(content(2, SMALL)), "peek", "B1", path="a")


def test_the_size_of_another_generation_is_found(history: History) -> None:
    old = history.save("a", 1, LARGE)
    history.see(OK, "open", "A2", slot="r", path="a", flags=os.O_RDONLY)
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=2)
    mixed = {"ok": {"size": SMALL, "read": described(old)}}
    with deviates():
        history.see(mixed, "peek", "A2", path="a")
    with deviates():
        history.see({"ok": SMALL}, "fstat", "A2", slot="r")


def test_a_mapping_that_ends_its_process_is_found(history: History) -> None:
    history.save("a", 1, LARGE)
    history.see(OK, "open", "A2", slot="r", path="a", flags=os.O_RDONLY)
    history.see({"ok": LARGE}, "map", "A2", slot="r", new="m")
    history.see(OK, "truncate", path="a", size=0)
    with deviates():
        history.see({"died": -7}, "look", "A2", slot="m", offset=0, length=1)


def test_a_refused_rename_that_published_is_found(history: History) -> None:
    old = history.save("a", 1, LARGE)
    history.save("b", 2, SMALL)
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=3)
    rename: Any = {"source": "a", "target": "b", "replace": False, "target_is_file": True}
    history.see({"errno": errno.EEXIST}, "rename", **rename)
    history.see(shown(old), "peek", "B1", path="a")
    with deviates():
        history.see(shown(content(3, SMALL)), "peek", "B1", path="a")


def test_bytes_of_the_generation_before_are_found(history: History) -> None:
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": LARGE}, "write", slot="w", offset=0, size=LARGE, seed=1)
    history.see(OK, "fsync", slot="w")
    history.see(OK, "ftruncate", slot="w", size=0)
    history.see({"ok": LARGE}, "write", slot="w", offset=0, size=LARGE, seed=2)
    history.see({"errno": errno.EOPNOTSUPP}, "read", slot="w", offset=0, length=9)
    with deviates():
        wrong = {"ok": described(content(1, LARGE)[:9])}
        history.see(wrong, "read", slot="w", offset=0, length=9)


def test_what_was_written_anew_may_be_refused_until_it_is_published(history: History) -> None:
    old = history.save("a", 1, UNIT)
    history.see(OK, "open", slot="w", path="a", flags=os.O_RDWR)
    history.see({"ok": SMALL}, "write", slot="w", offset=500, size=SMALL, seed=2)
    refused: Answer = {"errno": errno.EOPNOTSUPP}
    history.see(refused, "read", slot="w", offset=900, length=9)
    history.see(OK, "fsync", slot="w")
    with deviates():
        history.see(refused, "read", slot="w", offset=900, length=9)
    whole = old[:500] + content(2, SMALL)
    history.see({"ok": described(whole)}, "read", slot="w", offset=0, length=9999)


def test_what_cannot_be_read_back_though_it_was_published_is_found(history: History) -> None:
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": LARGE}, "write", slot="w", offset=0, size=LARGE, seed=1)
    history.see(OK, "unlink", path="a")
    history.see(OK, "fsync", slot="w")
    with deviates():
        history.see({"errno": errno.EOPNOTSUPP}, "read", slot="w", offset=0, length=9)


def test_a_reader_that_lost_its_file_is_found(history: History) -> None:
    old = history.save("a", 1, SMALL)
    history.see(OK, "open", "A2", slot="r", path="a", flags=os.O_RDONLY)
    for source, target in (("a", "b"), ("b", "a")):
        names: Any = {"source": source, "target": target, "replace": True, "target_is_file": True}
        history.see(OK, "rename", **names)
    history.see({"ok": described(old)}, "read", "A2", slot="r", offset=0, length=9999)
    with deviates():
        history.see({"errno": errno.EIO}, "read", "A2", slot="r", offset=0, length=9999)


def test_names_and_sizes_of_another_node_may_be_a_second_old(history: History) -> None:
    history.save("a", 1, LARGE)
    history.save("a", 2, SMALL)
    history.see({"ok": LARGE}, "stat", "B1", path="a", after_s=0.5)
    history.see(OK, "unlink", path="a")
    history.see({"ok": SMALL}, "stat", "B1", path="a", after_s=0.5)
    with deviates():
        history.see({"ok": SMALL}, "stat", "B1", path="a", after_s=2.0)
    with deviates():
        history.see({"ok": ["a"]}, "list", "B1", path="")


def test_an_open_finds_the_newest_commit_at_once(history: History) -> None:
    old = history.save("a", 1, LARGE)
    history.save("a", 2, SMALL)
    with deviates():
        history.see(shown(old), "peek", "B1", path="a", after_s=0.0)


def test_a_reader_elsewhere_may_lose_its_file_after_the_grace_only(history: History) -> None:
    history.save("a", 1, LARGE)
    history.see(OK, "open", "B1", slot="r", path="a", flags=os.O_RDONLY)
    history.save("a", 2, LARGE)
    with deviates():
        lost = {"errno": errno.EIO}
        history.see(lost, "read", "B1", slot="r", offset=0, length=9, after_s=1.0)
    history.see({"errno": errno.EIO}, "read", "B1", slot="r", offset=0, length=9, after_s=60.0)


def test_a_reader_elsewhere_may_lose_an_ordinary_file_at_once(history: History) -> None:
    history.save("a", 1, SMALL)
    history.see(OK, "open", "B1", slot="r", path="a", flags=os.O_RDONLY)
    history.save("a", 2, SMALL)
    history.see({"errno": errno.EIO}, "read", "B1", slot="r", offset=0, length=9, after_s=1.0)


def test_a_lost_name_is_found(history: History) -> None:
    history.save("a", 1, SMALL)
    history.see({"ok": ["a"]}, "list", "B1", path="")
    with deviates():
        history.see({"ok": []}, "list", "B1", path="")
    with deviates():
        history.see({"errno": errno.ENOENT}, "peek", "B1", path="a")


def test_of_two_writers_the_last_close_wins(history: History) -> None:
    history.see(OK, "open", "A1", slot="one", path="a", flags=WRITE)
    history.see(OK, "open", "B1", slot="two", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", "A1", slot="one", offset=0, size=SMALL, seed=1)
    history.see({"ok": LARGE}, "write", "B1", slot="two", offset=0, size=LARGE, seed=2)
    history.see(OK, "close", "B1", slot="two")
    history.see(OK, "close", "A1", slot="one")
    history.see(shown(content(1, SMALL)), "peek", "B1", path="a")
    with deviates():
        history.see(shown(content(2, LARGE)), "peek", "B1", path="a")


def test_who_adds_to_a_file_that_was_replaced_must_hear_of_it(history: History) -> None:
    history.save("a", 1, SMALL)
    append = os.O_WRONLY | os.O_APPEND
    history.see(OK, "open", "A2", slot="log", path="a", flags=append)
    history.see({"ok": SMALL}, "write", "A2", slot="log", offset=None, size=SMALL, seed=2)
    history.save("a", 3, LARGE, who="B1")
    with deviates():
        history.see(OK, "close", "A2", slot="log")


def test_a_writer_of_a_server_that_was_restarted_must_hear_of_it(history: History) -> None:
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    history.see({"ok": SMALL}, "write", slot="w", offset=0, size=SMALL, seed=1)
    history.model.apply({"do": "restart", "mount": "A", "how": "kill"}, OK)
    with deviates():
        history.see(OK, "close", slot="w")


def test_a_server_may_wait_for_a_file_that_was_cut_to_nothing(history: History) -> None:
    restart, busy = {"do": "restart", "mount": "A", "how": "wait"}, {"busy": "a is being written"}
    history.see(OK, "open", slot="w", path="a", flags=WRITE)
    with deviates():
        history.model.apply(restart, busy)
    history.see(OK, "ftruncate", slot="w", size=0)
    history.model.apply(restart, busy)
    history.see(OK, "fsync", slot="w")
    with deviates():
        history.model.apply(restart, busy)


def test_what_a_file_was_emptied_by_is_an_open_question_where_another_writes(
    history: History,
) -> None:
    old = history.save("a", 1, SMALL)
    history.see(OK, "open", "A1", slot="one", path="a", flags=WRITE)
    history.see(OK, "open", "A2", slot="two", path="a", flags=WRITE)
    history.see(OK, "close", "A1", slot="one")
    assert list(history.model.open_questions) == ["a"]
    with deviates():
        history.model.answer("a", shown(content(9, SMALL)))
    history.see(shown(old), "peek", "B1", path="a")


@pytest.mark.parametrize("flags", [os.O_CREAT | os.O_EXCL, os.O_CREAT])
def test_what_was_made_anew_since_a_file_was_emptied_stays(history: History, flags: int) -> None:
    """Regression: only an open with O_TRUNC counted, and the model expected an empty file."""
    history.save("a", 1, SMALL)
    history.see(OK, "open", "A1", slot="one", path="a", flags=WRITE)
    history.see(OK, "unlink", "B1", path="a")
    history.see(OK, "open", "A2", slot="two", path="a", flags=os.O_RDWR | flags)
    history.see({"ok": SMALL}, "write", "A2", slot="two", offset=0, size=SMALL, seed=2)
    history.see(OK, "close", "A2", slot="two")
    history.see(OK, "fsync", "A1", slot="one")
    history.see(OK, "close", "A1", slot="one")
    new = shown(content(2, SMALL))
    for path in list(history.model.open_questions):
        history.model.answer(path, new)
    history.see(new, "peek", "B1", path="a")


def test_which_of_two_made_a_name_may_be_an_open_question(history: History) -> None:
    """The node learns only from a look at the name that another node removed it."""
    history.see(OK, "open", "A1", slot="one", path="a", flags=WRITE)
    history.save("a", 1, SMALL, who="B1")
    history.see(OK, "unlink", "B1", path="a")
    history.see(OK, "open", "A2", slot="two", path="a", flags=os.O_RDWR | os.O_CREAT)
    history.see(OK, "fsync", "A2", slot="two")
    assert list(history.model.open_questions) == ["a"]
    history.model.answer("a", {"errno": errno.ENOENT})
    history.see(OK, "fsync", "A1", slot="one")
    history.model.answer("a", shown(b""))
    history.see(shown(b""), "peek", "B1", path="a")


def test_a_size_that_another_node_changed_may_be_a_second_old_after_a_rename(
    history: History,
) -> None:
    """Regression: a file that this node renamed had to show its new size at once."""
    history.save("a", 1, LARGE)
    history.save("a", 2, SMALL, who="B1")
    names: Any = {"source": "a", "target": "b", "replace": True, "target_is_file": True}
    history.see(OK, "rename", "A1", after_s=0.1, **names)
    history.see({"ok": LARGE}, "stat", "A2", path="b", after_s=0.1)
    with deviates():
        history.see({"ok": LARGE}, "stat", "A2", path="b", after_s=2.0)
