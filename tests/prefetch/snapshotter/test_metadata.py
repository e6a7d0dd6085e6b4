"""Database of snapshots against a model of containerd's rules, and after kills."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.prefetch.snapshotter.metadata import SnapshotDatabase
from bootseer.prefetch.snapshotter.snapshot import REF_LABEL, Snapshot, SnapshotKind, SnapshotUsage
from testbed.images.building import digest

CHAIN = digest(b"chain")
KEYS = st.sampled_from(["a", "b", "c", "d"])
PARENTS = st.sampled_from(["", "a", "b", "c", "d"])


def nothing(snapshot: Snapshot) -> None:
    """Make no directory."""


@pytest.fixture
def metadata(tmp_path: Path) -> SnapshotDatabase:
    return SnapshotDatabase(tmp_path / "metadata.db")


class Model(RuleBasedStateMachine):
    """Rules of containerd's core/snapshots/snapshotter.go, in a dict."""

    @initialize()
    def begin(self) -> None:
        self.known: dict[str, tuple[SnapshotKind, str]] = {}
        self.folder = tempfile.TemporaryDirectory()
        self.metadata = SnapshotDatabase(Path(self.folder.name) / "metadata.db")

    def expect(
        self, error: type[BootseerError] | None
    ) -> "contextlib.AbstractContextManager[object]":
        return pytest.raises(error) if error else contextlib.nullcontext()

    @rule(kind=st.sampled_from([SnapshotKind.ACTIVE, SnapshotKind.VIEW]), key=KEYS, parent=PARENTS)
    def create(self, kind: SnapshotKind, key: str, parent: str) -> None:
        error: type[BootseerError] | None = None
        if parent and parent not in self.known:
            error = NotFoundError
        elif parent and self.known[parent][0] is not SnapshotKind.COMMITTED:
            error = InvalidInputError
        elif key in self.known:
            error = AlreadyExistsError
        with self.expect(error):
            self.metadata.create(kind, key, parent, {"x": key}, nothing)
        if error is None:
            self.known[key] = (kind, parent)

    @rule(name=KEYS, key=KEYS)
    def commit(self, name: str, key: str) -> None:
        error: type[BootseerError] | None = None
        if key not in self.known:
            error = NotFoundError
        elif self.known[key][0] is not SnapshotKind.ACTIVE:
            error = BusyError
        elif name in self.known and name != key:
            error = AlreadyExistsError
        with self.expect(error):
            self.metadata.commit(name, key, {}, SnapshotUsage(5, 1))
        if error is None:
            self.known[name] = (SnapshotKind.COMMITTED, self.known.pop(key)[1])

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        error: type[BootseerError] | None = None
        if key not in self.known:
            error = NotFoundError
        elif any(parent == key for _, parent in self.known.values()):
            error = BusyError
        with self.expect(error):
            self.metadata.remove(key)
        if error is None:
            del self.known[key]

    @invariant()
    def same(self) -> None:
        found = {snapshot.key: (snapshot.kind, snapshot.parent) for snapshot in self.metadata.all()}
        assert found == self.known

    def teardown(self) -> None:
        if hasattr(self, "metadata"):
            self.metadata.close()
            self.folder.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=30, stateful_step_count=30)


def test_a_directory_that_cannot_be_made_leaves_no_snapshot(metadata: SnapshotDatabase) -> None:
    def fail(snapshot: Snapshot) -> None:
        raise BootseerError("no")

    with pytest.raises(BootseerError, match="no"):
        metadata.create(SnapshotKind.ACTIVE, "a", "", {}, fail)
    assert metadata.all() == []


def test_numbers_are_never_used_again(metadata: SnapshotDatabase) -> None:
    first = metadata.create(SnapshotKind.ACTIVE, "a", "", {}, nothing)
    metadata.remove("a")
    assert metadata.create(SnapshotKind.ACTIVE, "a", "", {}, nothing).number > first.number


def test_a_remote_snapshot_is_found_by_chain_and_parent(metadata: SnapshotDatabase) -> None:
    labels = {REF_LABEL: CHAIN}
    for parent in ("p", "q"):
        metadata.create(SnapshotKind.ACTIVE, parent, "", {}, nothing)
        metadata.commit(parent, parent, {}, SnapshotUsage())
    first = metadata.create_remote(CHAIN, "p", labels)
    assert first.key == CHAIN
    assert metadata.create_remote(CHAIN, "p", labels) == first
    # Another namespace of containerd, with lower layers of its own.
    second = metadata.create_remote(CHAIN, "q", labels)
    assert second.key != first.key
    assert metadata.find_remote(CHAIN, "q") == second
    assert metadata.find_remote(CHAIN, "") is None


def test_an_ordinary_snapshot_is_never_taken_for_a_remote_one(metadata: SnapshotDatabase) -> None:
    metadata.create(SnapshotKind.ACTIVE, "a", "", {}, nothing)
    metadata.commit("forged", "a", {REF_LABEL: CHAIN}, SnapshotUsage())
    assert metadata.find_remote(CHAIN, "") is None


def test_labels_change_one_by_one_or_all(metadata: SnapshotDatabase) -> None:
    metadata.create(SnapshotKind.ACTIVE, "a", "", {"x": "1", "y": "2"}, nothing)
    assert metadata.update("a", {"x": "3"}, ["labels.x"]).labels == {"x": "3", "y": "2"}
    assert metadata.update("a", {}, ["labels.y"]).labels == {"x": "3"}
    assert metadata.update("a", {"z": "4"}, []).labels == {"z": "4"}
    with pytest.raises(InvalidInputError):
        metadata.update("a", {}, ["parent"])


def test_of_many_that_create_one_key_one_succeeds(metadata: SnapshotDatabase) -> None:
    results: list[str] = []

    def create() -> None:
        try:
            metadata.create(SnapshotKind.ACTIVE, "a", "", {}, nothing)
            results.append("made")
        except AlreadyExistsError:
            results.append("there")

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["made"] + ["there"] * 7


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    code = """
import sys
from pathlib import Path
from bootseer.prefetch.snapshotter.metadata import SnapshotDatabase
from bootseer.prefetch.snapshotter.snapshot import SnapshotKind, SnapshotUsage
metadata = SnapshotDatabase(Path(sys.argv[1]))
for number in range(100_000):
    metadata.create(SnapshotKind.ACTIVE, f"a{number}", "", {}, lambda made: None)
    metadata.commit(f"c{number}", f"a{number}", {}, SnapshotUsage())
    print(number, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        answered = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
    metadata = SnapshotDatabase(path)
    committed = {found.key for found in metadata.all() if found.kind is SnapshotKind.COMMITTED}
    assert {f"c{number}" for number in answered} <= committed
    assert len(metadata.all()) <= len(committed) + 1


def test_a_later_versions_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(UnknownFormatError):
        SnapshotDatabase(path)


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(CorruptError, match=r"metadata\.db"):
        SnapshotDatabase(path)


def test_only_its_owner_may_read_it(tmp_path: Path, metadata: SnapshotDatabase) -> None:
    metadata.create(SnapshotKind.ACTIVE, "a", "", {}, nothing)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("metadata.db*")}
    assert set(modes.values()) == {0o600}, modes
