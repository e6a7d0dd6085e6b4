"""Collections that die, meet others, records that cannot be read, or storage without ages."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.errors import BusyError, CorruptError, UnknownFormatError
from bootseer.gc.collect import collect
from bootseer.gc.inventory import take_inventory
from bootseer.gc.plan import make_plan
from bootseer.gc.retention import Rules
from bootseer.snapshots import catalogue
from bootseer.snapshots.commands import create_snapshot
from bootseer.store import FileInfo, open_store
from tests.gc.collecting import NOW, add_access, add_image, check_all, keys_of, run_gc, run_setups
from tests.support.image_mounts import settings_at


def test_what_is_published_between_plan_and_deletion_is_spared(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    env = tmp_path / "env"
    env.mkdir()
    manifest = create_snapshot(settings, [str(env)])
    (target,) = manifest.targets
    with open_store(settings.store_url) as store:
        store.delete(catalogue.manifest_key(manifest.fingerprint))
        inventory = take_inventory(store)
        plan = make_plan(inventory, NOW, time.time_ns())
        assert len(plan.deletions) == 2
        create_snapshot(settings, [str(env)])
        done = collect(store, inventory, plan, NOW, owner="gc")
        assert set(done.spared) == set(plan.deletions)
        check_all(store)
        # And a writer whose blob went at the last moment does not leave a broken snapshot.
        store.delete(blob_key(target.blob.digest))
        store.delete(catalogue.manifest_key(manifest.fingerprint))
        with pytest.raises(BusyError, match="run it again"):
            catalogue.publish(store, manifest)
        assert list(catalogue.fingerprints(store)) == []


def test_where_the_storage_tells_no_ages_nothing_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("memory://ageless") as store:
        store.publish("blobs/sha256/" + "a" * 64, b"unnamed")
        for name in ("stat", "list"):
            monkeypatch.setattr(store.backend, name, _ageless(getattr(store.backend, name)))
        for rules, count in ((Rules(), 0), (NOW, 1)):
            inventory = take_inventory(store)
            plan = make_plan(inventory, rules, time.time_ns())
            assert len(plan.deletions) == count
            assert collect(store, inventory, plan, rules, owner="x").deleted_count == count


def _ageless(function: Any) -> Any:
    def call(*arguments: Any) -> Any:
        found = function(*arguments)
        if isinstance(found, FileInfo):
            return replace(found, modified_ns=0)
        return (replace(info, modified_ns=0) for info in found)

    return call


class _Killed(BaseException):
    """The end of the process, as far as the store can tell."""


def test_a_collection_that_dies_at_any_step_leaves_nothing_broken(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    add_image(settings, tmp_path, "one", "base", "a")
    add_access(settings, "one", b"base/file")
    add_image(settings, tmp_path, "two", "base", "b")
    add_access(settings, "two", b"b/file")
    run_setups(settings, tmp_path / "env", "ab")
    rules = replace(NOW, images=("one:1",), keep_last=1)
    steps = 0
    while True:
        with open_store(settings.store_url) as store:
            inventory = take_inventory(store)
            left = rules if "images/one%3A1.json" in inventory.images else replace(rules, images=())
            plan = make_plan(inventory, left, time.time_ns())

            def die(size_bytes: int) -> None:
                raise _Killed

            if not plan.deletions:
                break
            with pytest.raises(_Killed):
                collect(store, inventory, plan, left, owner="gc", on_deleted=die)
            check_all(store)
            steps += 1
    assert steps > 10
    assert {image.rpartition("/")[2] for image in keys_of(settings, "images/")} == {"two%3A1.json"}
    assert len(keys_of(settings, "snapshots/")) == 1


def test_a_record_that_cannot_be_read_stops_the_collection(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    (tmp_path / "env").mkdir()
    manifest = create_snapshot(settings, [str(tmp_path / "env")])
    key = catalogue.manifest_key(manifest.fingerprint)
    path = tmp_path / "store" / key
    text = path.read_text()
    for other, error in (
        ("{", CorruptError),
        (text.replace('"version": 1', '"version": 99'), UnknownFormatError),
    ):
        path.chmod(0o600)
        path.write_text(other)
        with pytest.raises(error, match=key):
            run_gc(settings)
    assert len(keys_of(settings, "blobs/")) == 1


def test_only_one_collects_and_dead_leases_end(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    with open_store(settings.store_url) as store:
        dead = store.lease("leases/snapshots/dead", ttl_s=0.001, owner="x")
        alive = store.lease("leases/snapshots/alive", ttl_s=3600, owner="x")
        assert dead is not None
        assert alive is not None
        for name in ("dead", "alive"):
            os.utime(tmp_path / "store/leases/snapshots" / name, (1, 1))
        time.sleep(2.1)  # the tolerance of clocks
        other = store.lease("leases/gc", ttl_s=60, owner="y")
        assert other is not None
        with other, pytest.raises(BusyError):
            run_gc(settings)
        run_gc(settings)
        assert keys_of(settings) == {"leases/snapshots/alive"}
        alive.release()
