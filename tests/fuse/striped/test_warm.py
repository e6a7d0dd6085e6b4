"""The rule that names the newest checkpoint."""

from pathlib import Path

import pytest

from bootseer.errors import CorruptError
from bootseer.fuse.striped.mount_spec import MountState, read_state, state_path, write_state
from bootseer.fuse.striped.warm import newest_files, tracked_name
from tests.fuse.striped.harness import Driver, storage_on

NAMES = ["iter_0000900", "iter_0001000", "step-20", "final"]


@pytest.mark.parametrize(
    ("trackers", "expected"),
    [
        ({}, None),
        ({"latest": "final\n"}, "final"),
        ({"latest": "/somewhere/else/step-20/"}, "step-20"),
        ({"latest_checkpointed_iteration.txt": "1000"}, "iter_0001000"),
        ({"latest_checkpointed_iteration.txt": "release"}, None),
        ({"latest": "gone", "latest_checkpointed_iteration.txt": "900"}, "iter_0000900"),
        ({"latest": ""}, None),
    ],
)
def test_trackers_are_followed(trackers: dict[str, str], expected: str | None) -> None:
    assert tracked_name(trackers, NAMES) == expected


def test_without_a_tracker_the_newest_is_taken(tmp_path: Path) -> None:
    driver = Driver(storage_on(tmp_path))
    driver.mkdir("a")
    driver.write("a/1", b"x")
    driver.mkdir("b")
    driver.mkdir("b/deep")
    driver.write("b/deep/2", b"x" * 100_000)
    assert [info.path for info in newest_files(driver.storage)] == ["b/deep/2"]
    driver.write("c", b"x")
    assert [info.path for info in newest_files(driver.storage)] == ["c"]
    driver.write("latest", b"a")
    assert [info.path for info in newest_files(driver.storage)] == ["a/1"]
    driver.storage.close()


def test_nothing_to_warm(tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    storage = storage_on(tmp_path / "empty")
    assert list(newest_files(storage)) == []
    storage.close()


def test_the_state_of_a_mount_survives_and_is_checked(tmp_path: Path) -> None:
    assert read_state(tmp_path, Path("/m")) is None
    state = MountState("file:///x", "/m", 1, 2, unwritten=("a",))
    write_state(tmp_path, state)
    assert read_state(tmp_path, Path("/m")) == state
    assert not state.is_running
    state_path(tmp_path, Path("/m")).write_text("{}")
    with pytest.raises(CorruptError):
        read_state(tmp_path, Path("/m"))
