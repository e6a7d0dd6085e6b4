"""What a collection deletes and what it spares, in real stores; and the plan against an oracle."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.blob.keys import blob_key, index_key
from bootseer.config import Settings
from bootseer.errors import (
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnknownFormatError,
)
from bootseer.gc.collect import Collected, collect
from bootseer.gc.inventory import Inventory, Object, take_inventory
from bootseer.gc.plan import Plan, make_plan
from bootseer.gc.retention import DAY_S, IN_USE_S, Rules
from bootseer.prefetch import hot_store
from bootseer.prefetch.catalogue import check_blobs, find_image, list_images, read_layer, read_tree
from bootseer.prefetch.chains import chain_ids, publish_chain_index, read_chain
from bootseer.prefetch.hot_build import add_trace
from bootseer.prefetch.trace import Access, Trace, TracedFile
from bootseer.snapshots import catalogue
from bootseer.snapshots.commands import create_snapshot, restore_snapshot
from bootseer.snapshots.manifest import Manifest, Stored, Target
from bootseer.snapshots.run import run_setup
from bootseer.snapshots.setup.fingerprint import Part, fingerprint
from bootseer.snapshots.setup.request import Request
from bootseer.snapshots.verify import Verifier
from bootseer.store import FileInfo, Store, open_store
from bootseer.store.uses import Use, note_use, use_key
from tests.support.image_mounts import index, mounted, settings_at, skip_unless_fuse
from tests.support.images import Member, write_layout

NOW = Rules(grace_s=0)
DAY_NS = DAY_S * 10**9


def _gc(settings: Settings, rules: Rules = NOW) -> tuple[Plan, Collected]:
    with open_store(settings.store_url) as store:
        inventory = take_inventory(store)
        plan = make_plan(inventory, rules, time.time_ns())
        done = collect(store, inventory, plan, rules, owner="gc")
        assert done.freed_bytes == plan.freed_bytes
        # Once more, there is nothing left to do; and nothing that is left is broken.
        left = take_inventory(store)
        again = make_plan(left, Rules(grace_s=rules.grace_s), time.time_ns())
        assert (again.deletions, done.spared, done.broken) == ((), (), ())
        _check_all(store)
    return plan, done


def _check_all(store: Store) -> None:
    for key in catalogue.fingerprints(store):
        assert Verifier(store).check(key).problems == ()
    for image in list_images(store):
        check_blobs(store, image)
        read_tree(store, image.index_digest)
        for chain_id in chain_ids(image.config.diff_ids):
            chain = read_chain(store, chain_id)
            assert chain is not None
            if chain.index_digest:
                read_tree(store, chain.index_digest)
        for diff_id in image.config.diff_ids:
            layer = read_layer(store, diff_id)
            assert layer is not None
            read_tree(store, layer.index_digest)
        for workload in hot_store.workloads(store, image.index_digest):
            pointer = hot_store.read_pointer(store, image.index_digest, workload)
            assert pointer is not None
            hot_store.read_hotset(store, pointer)


def _keys(settings: Settings, folder: str = "") -> set[str]:
    with open_store(settings.store_url) as store:
        return {info.path for info in store.list(folder)}


def _age(settings: Settings, folder: str, age_s: float) -> None:
    top = Path(settings.store_url.removeprefix("file://"))
    then = time.time() - age_s
    for path in (top / folder).rglob("*"):
        os.utime(path, (then, then))


def _image(settings: Settings, work: Path, name: str, *contents: str) -> None:
    layers = [[Member(f"{text}/file", data=text.encode() * 5000)] for text in contents]
    write_layout(work / name, layers)
    index(settings, Path(f"oci:{work / name}"), f"{name}:1")


def _trace(settings: Settings, name: str, path: bytes) -> None:
    with open_store(settings.store_url) as store:
        record = find_image(store, f"{name}:1")
        tree = read_tree(store, record.index_digest)
        number = tree.resolve(path)
        assert number is not None
        file = TracedFile(path, tree.inode(number).digest or b"")
        access = (Access(0, 0, 4096, 0),)
        trace = Trace(record.index_digest, "train", "n", 1, "ready", 32768, (file,), access)
        assert add_trace(settings, store, tree, trace, f"{name}:1") is not None


def test_an_image_goes_with_all_that_only_it_needs(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    _image(settings, tmp_path, "one", "base", "a")
    alone = _keys(settings)
    _trace(settings, "one", b"base/file")
    with_trace = _keys(settings)
    _image(settings, tmp_path, "two", "base", "b")
    _trace(settings, "two", b"b/file")
    assert _gc(settings)[0].deletions == ()
    plan, done = _gc(settings, replace(NOW, images=("two:1",)))
    assert {key for key, verdict in plan.images.items() if not verdict.is_kept} == {
        "images/two%3A1.json"
    }
    left = _keys(settings)
    # What the first one's trace told is also filed under the stream that both share.
    assert left == with_trace
    assert done.deleted_count == len(plan.deletions) > 8
    _gc(settings, replace(NOW, images=("one:1",)))
    assert _keys(settings) == set()
    assert {"images/one%3A1.json"} < alone
    with pytest.raises(NotFoundError, match="image list"):
        _gc(settings, replace(NOW, images=("one:1",)))


def test_a_tag_that_moved_leaves_its_bundle_to_the_next_build(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    _image(settings, tmp_path, "one", "base", "a")
    _trace(settings, "one", b"base/file")
    with open_store(settings.store_url) as store:
        old = find_image(store, "one:1")
    shutil.rmtree(tmp_path / "one")
    _image(settings, tmp_path, "one", "base", "b")
    with open_store(settings.store_url) as store:
        new = find_image(store, "one:1")
        # Somebody has published the merged tree of a chain of its layers.
        publish_chain_index(store, new.config.diff_ids, new.index_digest)
    _gc(settings)
    with open_store(settings.store_url) as store:
        assert hot_store.read_pointer(store, old.index_digest, "train") is not None
        read_tree(store, old.index_digest)
        # But nobody reads its own layers any more.
        assert not store.exists(blob_key(old.layers[1].blob_digest))
        assert read_layer(store, old.layers[1].digest) is None


def _runs(settings: Settings, env: Path, salts: str) -> list[str]:
    keys = []
    for salt in salts:
        shutil.rmtree(env, ignore_errors=True)
        script = f"mkdir {env}; echo $SALT > {env}/salt; echo same > {env}/same"
        request = Request(
            command=["sh", "-c", script],
            targets=[str(env)],
            salt=salt,
            environ={**os.environ, "SALT": salt},
        )
        keys.append(run_setup(settings, request).fingerprint)
    return keys


def test_rules_decide_which_snapshots_stay(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    env = tmp_path / "env"
    first, second, third = _runs(settings, env, "abc")
    named = create_snapshot(settings, [str(env)], "base-env").fingerprint
    (env / "salt").write_text("other")
    other = create_snapshot(settings, [str(env)]).fingerprint
    everything = {first, second, third, named, other}

    def kept(**rules: object) -> set[str]:
        with open_store(settings.store_url) as store:
            inventory = take_inventory(store)
        plan = make_plan(inventory, replace(NOW, **rules), time.time_ns())
        return {
            inventory.snapshots[key].fingerprint
            for key, verdict in plan.snapshots.items()
            if verdict.is_kept
        }

    assert kept() == kept(keep=("nothing",)) == kept(keep_days=1) == everything
    # Of each command: the two that were created from directories have none.
    assert kept(keep_last=2) == {second, third, named, other}
    assert kept(keep_last=1) == {third, other}
    assert kept(keep_last=1, keep=("base-*", first[:8])) == {first, third, named, other}
    assert kept(keep_last=0, grace_s=DAY_S) == everything
    assert kept(keep_last=0) == set()
    assert kept(snapshots=("base-env", first[:8])) == everything - {first, named}
    for wrong, error in ((("none",), NotFoundError), (("0123456789",), NotFoundError)):
        with pytest.raises(error):
            kept(snapshots=wrong)
    with pytest.raises((NotFoundError, InvalidInputError)):
        kept(snapshots=("",))
    _age(settings, "snapshots", 10 * DAY_S)
    assert kept(keep_days=9) == set()
    assert kept(keep_days=11) == everything
    # A restore is a use, and more so lately.
    shutil.rmtree(env)
    restore_snapshot(settings, first)
    assert kept(keep_days=9) == kept(keep_last=0) == {first}
    _age(settings, "used", IN_USE_S + 60)
    assert kept(keep_last=0) == set()
    assert kept(keep_days=9) == {first}
    plan, _ = _gc(settings, replace(NOW, keep_last=1))
    assert set(_keys(settings, "snapshots/")) == {
        *map(catalogue.manifest_key, (third, other)),
    }
    assert "snapshots/names/base-env.json" in plan.deletions
    assert len(_keys(settings, "blobs/")) == 2


def test_what_is_young_or_in_use_is_spared(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/file").write_text("x" * 1000)
    manifest = create_snapshot(settings, [str(tmp_path / "env")])
    with open_store(settings.store_url) as store:
        store.publish("blobs/sha256/" + "a" * 64, b"of a writer that is not ready yet")
        store.publish("warm/x/y", b"not ours to judge")
        store.publish("theirs/z", b"not ours at all")
        catalogue.note_used(store, manifest)
    removal = Rules(snapshots=(manifest.fingerprint,))
    # Its content and the writer's stay for a day; the note as long as the tree is in use.
    plan, _ = _gc(settings, removal)
    assert plan.deletions == (catalogue.manifest_key(manifest.fingerprint),)
    _age(settings, "blobs", 2 * DAY_S)
    _age(settings, "indexes", 2 * DAY_S)
    _age(settings, "warm", 2 * DAY_S)
    plan, _ = _gc(settings, Rules())
    assert plan.deletions == ("blobs/sha256/" + "a" * 64,)
    _age(settings, "used", IN_USE_S + 60)
    plan, _ = _gc(settings, Rules())
    (target,) = manifest.targets
    assert plan.deletions == (
        use_key(target.index.digest),
        index_key(target.index.digest),
        blob_key(target.blob.digest),
    )
    assert _keys(settings) == {"warm/x/y", "theirs/z"}


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
        _check_all(store)
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
    _image(settings, tmp_path, "one", "base", "a")
    _trace(settings, "one", b"base/file")
    _image(settings, tmp_path, "two", "base", "b")
    _trace(settings, "two", b"b/file")
    _runs(settings, tmp_path / "env", "ab")
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
            _check_all(store)
            steps += 1
    assert steps > 10
    assert {image.rpartition("/")[2] for image in _keys(settings, "images/")} == {"two%3A1.json"}
    assert len(_keys(settings, "snapshots/")) == 1


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
            _gc(settings)
    assert len(_keys(settings, "blobs/")) == 1


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
            _gc(settings)
        _gc(settings)
        assert _keys(settings) == {"leases/snapshots/alive"}
        alive.release()


def test_a_use_is_noted_once_a_day_and_never_fails(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    digest = "sha256:" + "1" * 64
    with open_store(settings.store_url) as store:
        note_use(store, digest, [digest])
        first = store.info(use_key(digest)).modified_ns
        note_use(store, digest, [digest])
        assert store.info(use_key(digest)).modified_ns == first
        _age(settings, "used", DAY_S)
        note_use(store, digest, [digest])
        assert store.info(use_key(digest)).modified_ns >= first
    with open_store((tmp_path / "env").as_uri()) as store:
        (tmp_path / "env").write_text("no folder")
        note_use(store, digest, [])


@pytest.mark.fuse
def test_what_a_mount_reads_stays_although_its_image_is_removed(tmp_path: Path) -> None:
    skip_unless_fuse()
    settings = settings_at(tmp_path)
    _image(settings, tmp_path, "one", "base", "a")
    with mounted(settings, "one:1", tmp_path / "mnt"), open_store(settings.store_url) as store:
        image = find_image(store, "one:1")
        end = time.monotonic() + 30
        while not store.exists(use_key(image.index_digest)) and time.monotonic() < end:
            time.sleep(0.05)
        _gc(settings, replace(NOW, images=("one:1",)))
        assert list(list_images(store)) == []
        check_blobs(store, image)
        read_tree(store, image.index_digest)


_LETTERS = st.sampled_from("abcd")


def _hash(letter: str) -> str:
    return letter * 64


def _synthetic(letters: str, salt: int) -> Manifest:
    parts = (Part("command", "x"), Part("salt", str(salt)))
    targets = tuple(
        Target(
            b"/" + letter.encode(),
            True,
            Stored("sha256:" + _hash(letter), 1),
            Stored("sha256:" + _hash(letter), 1),
            (),
            1,
            1,
        )
        for letter in sorted(set(letters))
    )
    return Manifest(fingerprint(parts), parts, targets, salt, 1, "n")


@given(
    st.lists(st.text(_LETTERS, min_size=1, max_size=3), max_size=6),
    st.dictionaries(_LETTERS, st.sampled_from((1, 2, 5))),
    st.dictionaries(_LETTERS, st.sampled_from((0, 2))),
    st.integers(0, 3),
)
def test_the_plan_keeps_what_is_needed_and_nothing_else(
    snapshots: list[str], used_days: dict[str, int], blob_days: dict[str, int], keep_last: int
) -> None:
    now_ns = 1000 * DAY_NS
    manifests = {
        catalogue.manifest_key(one.fingerprint): one
        for one in (_synthetic(letters, salt) for salt, letters in enumerate(snapshots))
    }
    uses = {
        use_key("sha256:" + _hash(letter)): Use(
            "sha256:" + _hash(letter), ("sha256:" + _hash(letter),)
        )
        for letter in used_days
    }
    objects = {key: Object(10, now_ns - 3 * DAY_NS) for key in manifests}
    for letter, days in used_days.items():
        objects[use_key("sha256:" + _hash(letter))] = Object(1, now_ns - days * DAY_NS)
    for letter in "abcd":
        age = blob_days.get(letter, 2) * DAY_NS
        for key in (blob_key("sha256:" + _hash(letter)), index_key("sha256:" + _hash(letter))):
            objects[key] = Object(100, now_ns - age)
    inventory = Inventory(objects, manifests, {}, {}, {}, {}, {}, {}, uses)
    plan = make_plan(inventory, Rules(keep_last=keep_last), now_ns)

    in_use = {letter for letter, days in used_days.items() if days < 3}
    groups: dict[str, list[tuple[int, str]]] = {}
    for salt, letters in enumerate(snapshots):
        groups.setdefault("".join(sorted(set(letters))), []).append((salt, letters))
    kept = {
        salt
        for group in groups.values()
        for place, (salt, letters) in enumerate(sorted(group, reverse=True))
        if place < keep_last or in_use & set(letters)
    }
    needed = in_use.union(*(snapshots[salt] for salt in kept))
    needed |= {letter for letter in "abcd" if blob_days.get(letter, 2) < 1}
    expected = {
        key
        for letter in set("abcd") - needed
        for key in (blob_key("sha256:" + _hash(letter)), index_key("sha256:" + _hash(letter)))
    }
    gone = set(plan.deletions)
    assert {key for key in gone if key.startswith(("blobs/", "indexes/"))} == expected
    assert {salt for salt, key in enumerate(manifests) if key not in gone} == kept
    # Records before what they name.
    order = [key.partition("/")[0] for key in plan.deletions]
    assert order == sorted(order, key=["snapshots", "used", "indexes", "blobs"].index)
