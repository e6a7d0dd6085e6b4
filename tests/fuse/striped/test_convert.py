"""Files are stored otherwise, also when killed on the way and by two at once."""

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import BusyError
from bootseer.fuse.striped.doors.convert import convert_file, is_stored_as
from bootseer.fuse.striped.doors.copy_tree import Place, copy_tree, sizes_below
from bootseer.fuse.striped.doors.fsck import check_tree, delete_garbage
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from tests.fuse.striped.harness import UNIT, storage_on
from tests.fuse.striped.stored import DATA, garbage_of, load, save


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
    """Run `work` in a process that is killed (9) when it has made `step` steps."""
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
            source = Place(None, str(tmp_path / "src"))
            copy_tree(source, Place(storage, "step-1"), sizes_below(source), count)

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
