"""Conversions of stored files, also killed on the way and by two processes at once."""

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import BusyError, InvalidInputError
from bootseer.fuse.striped.layout import Layout, PartFile, Segment, encode_layout, part_size
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.tools.copy import convert_file, is_stored_as
from bootseer.fuse.striped.tools.copy_tree import CopyPlace, copy_tree, sizes_below
from bootseer.fuse.striped.tools.fsck import check_tree, delete_garbage
from bootseer.store.local.backend import LocalBackend
from tests.fuse.striped.support.harness import UNIT, storage_on
from tests.fuse.striped.support.stored import DATA, garbage_of, load, save


def test_convert_there_and_back(storage: StripedStorage) -> None:
    save(storage, "d/f")
    save(storage, "d/small", b"1")
    plain = StripeSettings(UNIT, 3, 20.0, "plain")
    wide = StripeSettings(2 * UNIT, 4, 20.0)
    for settings, parts in ((plain, 0), (wide, 4), (storage.settings, 3), (plain, 0)):
        assert convert_file(storage, "d/f", settings)
        assert not convert_file(storage, "d/f", settings)
        view = storage.tree.stored.view("d/f")
        assert is_stored_as(view, settings)
        assert len(view.layout.segments[0].parts if view.layout else ()) == parts
        assert load(storage, "d/f") == DATA
    assert storage.backend.read("d/f") == DATA
    assert not convert_file(storage, "d/small", plain)


def test_a_directorys_rule_does_not_overrule_what_is_asked_for(local: StripedStorage) -> None:
    with local.backend.create(".bootseer-layout") as writer:
        writer.write(b"striped\n")
    save(local, "f")
    assert convert_file(local, "f", StripeSettings(UNIT, 3, 20.0, "plain"))
    assert local.backend.read("f") == DATA


def test_a_convert_stores_as_asked_or_not_at_all(tmp_path: Path) -> None:
    """Regression: with little memory a file got fewer parts, and each convert stored it again."""
    wanted = StripeSettings(UNIT, 8, 20.0)
    with storage_on(tmp_path, memory_bytes=16 * UNIT) as storage:
        save(storage, "f")
        assert convert_file(storage, "f", wanted)
        assert is_stored_as(storage.tree.stored.view("f"), wanted)
        assert not convert_file(storage, "f", wanted)
        assert load(storage, "f") == DATA
    with storage_on(_Buffering(tmp_path), memory_bytes=16 * UNIT) as storage:
        before = storage.tree.stored.view("f").identity
        with pytest.raises(InvalidInputError, match="too few to write 7 parts at once"):
            convert_file(storage, "f", StripeSettings(UNIT, 7, 20.0))
        assert storage.tree.stored.view("f").identity == before
        assert load(storage, "f") == DATA


class _Buffering(LocalBackend):
    writer_bytes = 5 * UNIT


def test_a_file_of_several_full_segments_is_stored_as_asked(local: StripedStorage) -> None:
    """Regression: each convert stored files larger than a block of all parts again."""

    def is_stored(*sizes: int, count: int = 3) -> bool:
        name = "-".join(map(str, sizes))
        segments = tuple(_segment(number, units) for number, units in enumerate(sizes))
        with local.backend.create(name, overwrite=True) as writer:
            writer.write(encode_layout(Layout("0" * 32, segments)))
        return is_stored_as(local.tree.stored.view(name), StripeSettings(UNIT, count))

    assert is_stored(6)
    assert is_stored(6, 6, 2)
    assert not is_stored(6, 6, 2, count=4)
    assert not is_stored(2, 6)
    assert not is_stored(6, 3, 6)


def _segment(number: int, units: int) -> Segment:
    """Return a segment of so many units in up to three parts."""
    size, count = units * UNIT, min(3, units)
    parts = tuple(
        PartFile(f"{index:02x}", part_size(size, UNIT, count, index)) for index in range(count)
    )
    return Segment(f"{number:032x}", size, UNIT, UNIT, parts, bytes(8 * units), bytes(32 * units))


def test_of_two_converts_at_once_one_says_that_it_was_late(
    local: StripedStorage, tmp_path: Path
) -> None:
    save(local, "f")
    with storage_on(tmp_path / "stored") as other:
        inside = threading.Event()

        def wait(count: int) -> None:
            if not inside.is_set():
                inside.set()
                assert convert_file(other, "f", StripeSettings(2 * UNIT, 2, 20.0))

        with pytest.raises(BusyError, match="replaced while"):
            convert_file(local, "f", StripeSettings(UNIT, 2, 20.0), wait)
    view = local.tree.stored.view("f")
    assert view.layout is not None
    assert view.layout.segments[0].stripe_unit_bytes == 2 * UNIT
    assert load(local, "f") == DATA
    assert list(garbage_of(local)) == []


def killed_after(step: int, work: Callable[[Callable[[int], None]], object]) -> None:
    """Run `work` in a process that is killed (9) after `step` steps."""
    child = os.fork()
    if child == 0:
        steps = itertools.count(1)

        def count(_: int) -> None:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(count)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_convert_or_copy_that_is_killed_leaves_what_was_there(
    step: int, tmp_path: Path, young: Callable[[], None]
) -> None:
    (tmp_path / "src").mkdir()
    for number in range(8):
        (tmp_path / "src" / str(number)).write_bytes(DATA)
    with storage_on(tmp_path / "stored") as storage:
        save(storage, "f")
        identity = storage.tree.stored.status("f").identity

    def convert(count: Callable[[int], None]) -> None:
        with storage_on(tmp_path / "stored") as storage:
            convert_file(storage, "f", StripeSettings(2 * UNIT, 2, 20.0), count)

    def copy(count: Callable[[int], None]) -> None:
        with storage_on(tmp_path / "stored") as storage:
            source = CopyPlace(None, str(tmp_path / "src"))
            copy_tree(source, CopyPlace(storage, "step-1"), sizes_below(source), count)

    killed_after(step, convert)
    killed_after(step, copy)
    young()
    with storage_on(tmp_path / "stored") as storage:
        assert storage.tree.stored.status("f").identity == identity
        for report in check_tree(storage):
            assert not report.troubles
            delete_garbage(storage, report, 0)
        assert [info.path for info in storage.tree.stored.entries("")] == ["f"]
        assert not list(garbage_of(storage))
        assert load(storage, "f") == DATA
