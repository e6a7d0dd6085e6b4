"""A node's record of its caches, and when it is dropped."""

import os
from pathlib import Path

import pytest

from bootseer.launch.caches import records
from bootseer.launch.caches.records import CacheRecord, forget_unused, note, note_user, read_record

KEY = "5" * 64


def known(cache_dir: Path, key: str = KEY, name: str = "x") -> CacheRecord:
    folder = records.own_folder(cache_dir, key, name)
    folder.mkdir(parents=True)
    record = CacheRecord(key=key, name=name, folder=str(folder), hits=2, misses=1, index="sha256:1")
    note(cache_dir, record)
    return record


def test_what_is_noted_is_read(tmp_path: Path) -> None:
    record = known(tmp_path)
    found = read_record(tmp_path, KEY)
    assert found is not None
    assert (found.hits, found.misses, found.index) == (2, 1, record.index)
    assert found.used_ns > 0
    assert list(records.records(tmp_path)) == [found]


def test_what_is_damaged_or_somebody_elses_counts_for_nothing(tmp_path: Path) -> None:
    known(tmp_path)
    (path,) = (tmp_path / "kept/records").iterdir()
    path.write_text("{")
    assert read_record(tmp_path, KEY) is None
    assert list(records.records(tmp_path)) == []


def test_a_folder_that_nobody_used_for_a_month_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, used = known(tmp_path), known(tmp_path, "6" * 64)
    assert forget_unused(tmp_path) == 0
    note_user(tmp_path, Path(used.folder), os.getpid())
    monkeypatch.setattr(records, "UNUSED_S", -1)
    # The record of a living process stays, however old it is.
    assert forget_unused(tmp_path) == 1
    assert not Path(old.folder).exists()
    assert Path(used.folder).is_dir()
    assert [record.key for record in records.records(tmp_path)] == [used.key]
    monkeypatch.setattr(records, "living_processes", lambda folder: iter(()))
    assert forget_unused(tmp_path) == 1
    assert list(records.records(tmp_path)) == []


def test_a_folder_of_the_user_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some" / "cache"
    folder.mkdir(parents=True)
    note(tmp_path, CacheRecord(key=KEY, name="x", folder=str(folder)))
    monkeypatch.setattr(records, "UNUSED_S", -1)
    forget_unused(tmp_path)
    assert folder.is_dir()
