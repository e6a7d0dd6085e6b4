"""Collections with faults: kills, other collectors, unreadable records, storage without times."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key
from bootseer.errors import (
    BusyError,
    CorruptError,
    NoSpaceError,
    PermissionDeniedError,
    UnknownFormatError,
)
from bootseer.gc.collect import collect
from bootseer.gc.inventory import take_inventory
from bootseer.gc.plan import Rules, make_plan
from bootseer.launch.formats import FORMATS
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.store import FileInfo, Store, Writer, open_store
from bootseer.store.local.backend import LocalBackend
from bootseer.store.objects import lease
from bootseer.store.objects.uses import note_use, use_key
from testbed.mounts.image_mounts import settings_at
from testbed.servers.faulty_relay import FaultyRelay
from testbed.waiting import TIMEOUT_S, wait_for
from tests.bootseer.gc.collecting import (
    NOW,
    add_access,
    add_image,
    check_all,
    keys_of,
    run_gc,
    run_setups,
)


def test_what_is_published_between_plan_and_deletion_is_spared(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    env = tmp_path / "env"
    env.mkdir()
    manifest = create_snapshot(settings, [str(env)])
    (target,) = manifest.targets
    with open_store(settings.store_url) as store:
        store.delete(catalogue.manifest_key(manifest.fingerprint))
        inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, NOW)
        assert len(plan.deletions) == 2
        create_snapshot(settings, [str(env)])
        done = collect(store, inventory, plan, NOW, owner="gc")
        assert set(done.spared) == set(plan.deletions)
        check_all(store)
        # And a writer whose blob was deleted at the last moment does not leave a broken snapshot.
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
            inventory = take_inventory(store, FORMATS)
            plan = make_plan(inventory, rules)
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
    """End of the process, as the store sees it."""


def bundles_in(settings: Settings) -> dict[str, set[str]]:
    """Return the members of each bundle in the store, by the bundle's key in its header."""
    found: dict[str, set[str]] = {}
    for key in keys_of(settings, "bundles/"):
        found.setdefault(f"{key.rpartition('/')[0]}/header", set()).add(key)
    return found


def test_a_collection_that_dies_at_any_step_leaves_nothing_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_at(tmp_path)
    add_image(settings, tmp_path, "one", "base", "a")
    add_access(settings, "one", b"base/file")
    add_image(settings, tmp_path, "two", "base", "b")
    add_access(settings, "two", b"b/file")
    run_setups(settings, tmp_path / "env", "ab")
    rules = replace(NOW, images=("one:1",), keep_last=1)
    whole = bundles_in(settings)
    assert len(whole) == 2
    delete = LocalBackend.delete

    def die(self: LocalBackend, path: str, *, recursive: bool = False) -> None:
        delete(self, path, recursive=recursive)
        if not path.startswith((".tmp/", "leases/")):
            raise _Killed

    steps = 0
    while True:
        with open_store(settings.store_url) as store:
            inventory = take_inventory(store, FORMATS)
            left = (
                rules if "images/one%3A1.json" in inventory.objects else replace(rules, images=())
            )
            plan = make_plan(inventory, left)
            if not plan.deletions:
                break
            with monkeypatch.context() as patched:
                patched.setattr(LocalBackend, "delete", die)
                with pytest.raises(_Killed):
                    collect(store, inventory, plan, left, owner="gc")
            check_all(store)
            # A start that has read the pointer finds no header, or all that it names.
            keys = keys_of(settings, "bundles/")
            for header, parts in whole.items():
                assert header not in keys or parts <= keys
            steps += 1
    assert steps > 10
    assert {image.rpartition("/")[2] for image in keys_of(settings, "images/")} == {"two%3A1.json"}
    assert len(keys_of(settings, "snapshots/")) == 1


def test_records_are_read_several_at_a_time_and_objects_deleted_by_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a store with thousands of objects takes hours."""
    settings = settings_at(tmp_path)
    run_setups(settings, tmp_path / "env", "abcdefgh")
    together = threading.Barrier(4)
    is_read = LocalBackend.read

    def read(self: LocalBackend, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.startswith("snapshots/"):
            together.wait(TIMEOUT_S)
        return is_read(self, path, offset, length)

    with open_store(settings.store_url) as store:
        with monkeypatch.context() as patched:
            patched.setattr(LocalBackend, "read", read)
            inventory = take_inventory(store, FORMATS)
        assert len(list(inventory.entries())) == 8
        plan = make_plan(inventory, replace(NOW, keep_last=0))
        batches: list[list[str]] = []

        def delete_many(keys: Iterable[str]) -> None:
            batches.append(list(keys))
            Store.delete_many(store, batches[-1])

        monkeypatch.setattr(store, "delete_many", delete_many)
        done = collect(store, inventory, plan, replace(NOW, keep_last=0), owner="gc")
    assert done.deleted_count == len(plan.deletions) >= 16
    assert len(batches) < done.deleted_count / 2
    assert [key for batch in batches for key in batch] == list(plan.deletions)


def test_content_of_a_bucket_goes_by_few_requests(
    moto: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object's metadata was once requested again before its deletion."""
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as relay:
        for name, value in {**moto, "AWS_ENDPOINT_URL": f"http://{relay.host}"}.items():
            monkeypatch.setenv(name, value)
        with open_store("s3://conformance/collected") as store:
            for number in range(40):
                store.publish(f"blobs/blake3/{number:064}", b"x")
            inventory = take_inventory(store, FORMATS)
            plan = make_plan(inventory, NOW)
            relay.seen.clear()
            done = collect(store, inventory, plan, NOW, owner="gc")
            methods = [one.method for one in relay.seen]
    assert done.deleted_count == 40
    # Two listings, two times of the storage's clock, a lease: none grows with the deletions.
    assert len(methods) < 40


def test_what_changed_since_it_was_listed_stays(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    key = "blobs/sha256/" + "a" * 64
    with open_store(settings.store_url) as store:
        store.publish(key, b"old")
        inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, NOW)
        assert plan.deletions == (key,)
        store.publish(key, b"another", replace=True)
        collected = collect(store, inventory, plan, NOW, owner="gc")
        assert collected.spared == (key,)
        assert store.read(key) == b"another"


def test_a_record_that_cannot_be_read_stops_the_collection(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    (tmp_path / "env").mkdir()
    manifest = create_snapshot(settings, [str(tmp_path / "env")])
    key = catalogue.manifest_key(manifest.fingerprint)
    path = tmp_path / "store" / key
    later = {**json.loads(path.read_text()), "version": 99}
    del later["digest"]
    for other, error in (("{", CorruptError), (json.dumps(later), UnknownFormatError)):
        path.chmod(0o600)
        path.write_text(other)
        with pytest.raises(error, match=key):
            run_gc(settings)
    assert len(keys_of(settings, "blobs/")) == 1


def test_only_one_collects_and_dead_leases_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SKEW_S", 0.0)
    settings = settings_at(tmp_path)
    with open_store(settings.store_url) as store:
        dead = store.lease("leases/snapshots/dead", ttl_s=0.001, owner="x")
        alive = store.lease("leases/snapshots/alive", ttl_s=3600, owner="x")
        assert dead is not None
        assert alive is not None
        for name in ("dead", "alive"):
            os.utime(tmp_path / "store/leases/snapshots" / name, (1, 1))
        wait_for(lambda: not dead.still_held)
        other = store.lease("leases/gc", ttl_s=60, owner="y")
        assert other is not None
        with other, pytest.raises(BusyError):
            run_gc(settings)
        run_gc(settings)
        assert keys_of(settings) == {"leases/snapshots/alive"}
        alive.release()


@pytest.mark.needs("root")
def test_a_full_store_is_collected(tmp_path: Path) -> None:
    """A named fault: without room for the collector's lease, a full store stayed full."""
    settings = settings_at(tmp_path)
    disk = tmp_path / "store"
    disk.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", disk], check=True)
    try:
        key = "blobs/sha256/" + "a" * 64
        with open_store(settings.store_url) as store:
            store.publish(key, bytes(2**18))
            lease = store.lease("leases/gc", ttl_s=3600, owner="killed")
            assert lease is not None
            _fill(disk / ".tmp" / ("b" * 32))
            with pytest.raises(NoSpaceError, match="delete leases/gc"):
                run_gc(settings)
            lease.release()
        _fill(disk / ".tmp" / ("c" * 32))
        assert run_gc(settings)[0].deletions == (key,)
    finally:
        subprocess.run(["umount", disk], check=True)


def _fill(path: Path) -> None:
    """Fill the disk to its last page, as another writer might meanwhile."""
    path.parent.mkdir(exist_ok=True)
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


_HOUR_NS = 3600 * 10**9


def _publishing(settings: Settings) -> Store:
    """Return a store with a blob without a record yet, and a temporary, both a minute old."""
    store = open_store(settings.store_url)
    store.publish("blobs/sha256/" + "a" * 64, b"its record is still to come")
    hidden = Path(settings.store_url.removeprefix("file://")) / ".tmp" / ("b" * 32)
    hidden.parent.mkdir(exist_ok=True)
    hidden.write_bytes(b"on its way")
    return store


def _set_clock(monkeypatch: pytest.MonkeyPatch, ahead_ns: int) -> None:
    """Set the clock of this process ahead; the times of files are still the kernel's."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead_ns)


@pytest.mark.parametrize("ahead_hours", [-24 * 365, -48, 0, 48, 24 * 365])
def test_a_wrong_clock_of_the_collector_makes_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_hours: int
) -> None:
    settings = settings_at(tmp_path)
    with _publishing(settings) as store:
        held = store.lease("leases/snapshots/held", ttl_s=3600, owner="x")
        assert held is not None
        # A holder that renews for days writes elsewhere, so that the lease itself looks old.
        os.utime(tmp_path / "store/leases/snapshots/held", (1, 1))
        _set_clock(monkeypatch, ahead_hours * _HOUR_NS)
        inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, Rules())
        assert plan.deletions == ()
        collect(store, inventory, plan, Rules(), owner="gc")
        assert held.still_held
        assert {*keys_of(settings)} == {"blobs/sha256/" + "a" * 64, "leases/snapshots/held"}
        assert (tmp_path / "store/.tmp" / ("b" * 32)).exists()


def test_publishers_with_a_clock_that_is_ahead_do_not_sweep_what_others_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_at(tmp_path)
    with _publishing(settings):
        _set_clock(monkeypatch, 48 * _HOUR_NS)
        with open_store(settings.store_url) as store:
            store.publish("theirs/x", b"")
        assert (tmp_path / "store/.tmp" / ("b" * 32)).exists()
        monkeypatch.undo()
        os.utime(tmp_path / "store/.tmp" / ("b" * 32), (1, 1))
        with open_store(settings.store_url) as store:
            store.publish("theirs/y", b"")
        assert not (tmp_path / "store/.tmp" / ("b" * 32)).exists()


def test_what_was_written_by_a_clock_that_was_ahead_stays_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_at(tmp_path)
    with _publishing(settings) as store:
        then = time.time() + 7 * 86_400
        for path in (tmp_path / "store/blobs").rglob("*"):
            os.utime(path, (then, then))
        assert make_plan(take_inventory(store, FORMATS), NOW).deletions == ()
        assert "still to come" in caplog.text


def test_a_note_of_a_use_is_renewed_by_a_node_whose_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "sha256:" + "1" * 64
    note = tmp_path / "store" / use_key(digest)
    with open_store(settings_at(tmp_path).store_url) as store:
        note_use(store, digest, [digest])
        os.utime(note, (time.time() - 2 * 86_400,) * 2)
        _set_clock(monkeypatch, -7 * 24 * _HOUR_NS)
        note_use(store, digest, [digest])
    assert time.time() - note.stat().st_mtime < 86_400


def test_a_store_that_cannot_be_written_is_judged_by_its_newest_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_at(tmp_path)
    with _publishing(settings) as store:

        def refuse(path: str, *, overwrite: bool = False) -> Writer:
            raise PermissionDeniedError(f"cannot write {path}")

        monkeypatch.setattr(store.backend, "create", refuse)
        _set_clock(monkeypatch, 48 * _HOUR_NS)
        assert make_plan(take_inventory(store, FORMATS), Rules()).deletions == ()


def test_a_store_that_is_not_there_is_not_made_by_a_look_at_it(tmp_path: Path) -> None:
    with open_store(settings_at(tmp_path).store_url) as store:
        assert make_plan(take_inventory(store, FORMATS), Rules()).deletions == ()
    assert not (tmp_path / "store").exists()
