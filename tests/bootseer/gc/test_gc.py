"""The objects that a collection deletes and keeps, in real stores."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.gc.inventory import take_inventory
from bootseer.gc.plan import DAY_S, Rules, make_plan
from bootseer.launch.formats import FORMATS
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.index.catalogue import (
    check_blobs,
    find_image,
    list_images,
    read_layer,
    read_tree,
)
from bootseer.prefetch.index.chains import publish_chain_index
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.restore import restore_snapshot
from bootseer.store import open_store
from bootseer.store.objects.uses import IN_USE_S, note_use, use_key
from testbed.mounts.image_mounts import mounted, settings_at
from testbed.waiting import wait_for
from tests.bootseer.gc.collecting import (
    NOW,
    add_access,
    add_image,
    age,
    keys_of,
    run_gc,
    run_setups,
)


def test_an_image_goes_with_all_that_only_it_needs(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    add_image(settings, tmp_path, "one", "base", "a")
    alone = keys_of(settings)
    add_access(settings, "one", b"base/file")
    with_trace = keys_of(settings)
    add_image(settings, tmp_path, "two", "base", "b")
    add_access(settings, "two", b"b/file")
    assert run_gc(settings)[0].deletions == ()
    plan, done = run_gc(settings, replace(NOW, images=("two:1",)))
    assert {key for key, verdict in plan.verdicts.items() if not verdict.is_kept} == {
        "images/two%3A1.json"
    }
    left = keys_of(settings)
    # The first image's trace is also filed under the stream that both images share.
    assert left == with_trace
    assert done.deleted_count == len(plan.deletions) > 8
    run_gc(settings, replace(NOW, images=("one:1",)))
    assert keys_of(settings) == set()
    assert {"images/one%3A1.json"} < alone
    with pytest.raises(NotFoundError, match="image list"):
        run_gc(settings, replace(NOW, images=("one:1",)))


def test_a_tag_that_moved_leaves_its_bundle_to_the_next_build(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    add_image(settings, tmp_path, "one", "base", "a")
    add_access(settings, "one", b"base/file")
    with open_store(settings.store_url) as store:
        old = find_image(store, "one:1")
    shutil.rmtree(tmp_path / "one")
    add_image(settings, tmp_path, "one", "base", "b")
    with open_store(settings.store_url) as store:
        new = find_image(store, "one:1")
        # The merged tree of a chain of its layers was published.
        publish_chain_index(store, new.config.diff_ids, new.index_digest)
    run_gc(settings)
    with open_store(settings.store_url) as store:
        assert hot_store.read_pointer(store, old.index_digest, "train") is not None
        read_tree(store, old.index_digest)
        # But nobody reads its own layers any more.
        assert not store.exists(blob_key(old.layers[1].blob_digest))
        assert read_layer(store, old.layers[1].digest) is None


def test_rules_decide_which_snapshots_stay(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    env = tmp_path / "env"
    first, second, third = run_setups(settings, env, "abc")
    named = create_snapshot(settings, [str(env)], "base-env").fingerprint
    (env / "salt").write_text("other")
    other = create_snapshot(settings, [str(env)]).fingerprint
    everything = {first, second, third, named, other}

    def kept(**rules: object) -> set[str]:
        with open_store(settings.store_url) as store:
            inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, replace(NOW, **rules))
        return {entry.name for key, entry in inventory.entries() if plan.verdicts[key].is_kept}

    assert kept() == kept(keep=("nothing",)) == kept(keep_days=1) == everything
    # Traces of each command; the two images that were created from directories have none.
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
    age(settings, "snapshots", 10 * DAY_S)
    assert kept(keep_days=9) == set()
    assert kept(keep_days=11) == everything
    # A restore is a use, and a recent one.
    shutil.rmtree(env)
    restore_snapshot(settings, first)
    assert kept(keep_days=9) == kept(keep_last=0) == {first}
    age(settings, "used", IN_USE_S + 60)
    assert kept(keep_last=0) == set()
    assert kept(keep_days=9) == {first}
    plan, _ = run_gc(settings, replace(NOW, keep_last=1))
    assert set(keys_of(settings, "snapshots/")) == {
        *map(catalogue.manifest_key, (third, other)),
    }
    assert "snapshots/names/base-env.json" in plan.deletions
    assert len(keys_of(settings, "blobs/")) == 2


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
    plan, _ = run_gc(settings, removal)
    assert plan.deletions == (catalogue.manifest_key(manifest.fingerprint),)
    age(settings, "blobs", 2 * DAY_S)
    age(settings, "indexes", 2 * DAY_S)
    age(settings, "warm", 2 * DAY_S)
    plan, _ = run_gc(settings, Rules())
    assert plan.deletions == ("blobs/sha256/" + "a" * 64,)
    age(settings, "used", IN_USE_S + 60)
    plan, _ = run_gc(settings, Rules())
    (target,) = manifest.targets
    assert plan.deletions == (
        use_key(target.index.digest),
        index_key(target.index.digest),
        blob_key(target.blob.digest),
    )
    assert keys_of(settings) == {"warm/x/y", "theirs/z"}


def test_a_use_is_noted_once_a_day_and_never_fails(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    digest = "sha256:" + "1" * 64
    with open_store(settings.store_url) as store:
        note_use(store, digest, [digest])
        first = store.info(use_key(digest)).modified_ns
        note_use(store, digest, [digest])
        assert store.info(use_key(digest)).modified_ns == first
        age(settings, "used", DAY_S)
        note_use(store, digest, [digest])
        assert store.info(use_key(digest)).modified_ns >= first
    with open_store((tmp_path / "env").as_uri()) as store:
        (tmp_path / "env").write_text("no folder")
        note_use(store, digest, [])


@pytest.mark.needs("fuse")
def test_what_a_mount_reads_stays_although_its_image_is_removed(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    add_image(settings, tmp_path, "one", "base", "a")
    with mounted(settings, "one:1", tmp_path / "mnt"), open_store(settings.store_url) as store:
        image = find_image(store, "one:1")
        wait_for(lambda: store.exists(use_key(image.index_digest)), "the note of the use")
        run_gc(settings, replace(NOW, images=("one:1",)))
        assert list(list_images(store)) == []
        check_blobs(store, image)
        read_tree(store, image.index_digest)
