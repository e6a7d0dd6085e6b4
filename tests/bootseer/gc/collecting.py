"""Stores with images, traces and snapshots, and the check of a collection."""

import os
import shutil
import time
from pathlib import Path

from bootseer.base.content_digest import content_digest
from bootseer.gc.collect import Collected, collect
from bootseer.gc.inventory import take_inventory
from bootseer.gc.plan import CollectionPlan, Rules, make_plan
from bootseer.launch.formats import FORMATS
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import decode_frame
from bootseer.prefetch.index.catalogue import (
    check_blobs,
    find_image,
    list_images,
    read_layer,
    read_tree,
)
from bootseer.prefetch.index.chains import chain_ids, read_chain
from bootseer.prefetch.publish.bundle_build import add_trace
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.trace import Access, Trace
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import Verifier
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.store import Store, open_store
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import index

NOW = Rules(grace_s=0)


def run_gc(settings: Settings, rules: Rules = NOW) -> tuple[CollectionPlan, Collected]:
    with open_store(settings.store_url) as store:
        inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, rules)
        done = collect(store, inventory, plan, rules, owner="gc")
        assert done.freed_bytes == plan.freed_bytes
        # Once more, there is nothing left to do; and nothing that is left is broken.
        left = take_inventory(store, FORMATS)
        again = make_plan(left, Rules(grace_s=rules.grace_s))
        assert (again.deletions, done.spared, done.broken) == ((), (), ())
        check_all(store)
    return plan, done


def check_all(store: Store) -> None:
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
            tree = read_tree(store, image.index_digest)
            lengths = [blob.stream_length for blob in tree.blobs]
            for frame in hot_store.read_bundle(store, pointer, lengths).frames:
                key = hot_store.part_key(pointer.bundle_digest, frame.part)
                stored = store.read(key, frame.offset, frame.length)
                assert content_digest(stored) == frame.digest
                decode_frame(frame, stored)


def keys_of(settings: Settings, folder: str = "") -> set[str]:
    with open_store(settings.store_url) as store:
        return {info.path for info in store.list(folder)}


def age(settings: Settings, folder: str, age_s: float) -> None:
    top = Path(settings.store_url.removeprefix("file://"))
    then = time.time() - age_s
    for path in (top / folder).rglob("*"):
        os.utime(path, (then, then))


def add_image(settings: Settings, work: Path, name: str, *contents: str) -> None:
    layers = [[Member(f"{text}/file", data=text.encode() * 5000)] for text in contents]
    write_layout(work / name, layers)
    index(settings, Path(f"oci:{work / name}"), f"{name}:1")


def add_access(settings: Settings, name: str, path: bytes) -> None:
    with open_store(settings.store_url) as store:
        record = find_image(store, f"{name}:1")
        tree = read_tree(store, record.index_digest)
        number = tree.resolve(path)
        assert number is not None
        file = TracedFile(path, tree.inode(number).digest or b"")
        access = (Access(0, 0, 4096, 0),)
        trace = Trace(record.index_digest, "train", "n", 1, "ready", 32768, (file,), access)
        assert add_trace(settings, store, tree, trace, f"{name}:1") is not None


def run_setups(settings: Settings, env: Path, salts: str) -> list[str]:
    keys = []
    for salt in salts:
        shutil.rmtree(env, ignore_errors=True)
        script = f"mkdir {env}; echo $SALT > {env}/salt; echo same > {env}/same"
        request = SetupRequest(
            command=["sh", "-c", script],
            targets=[str(env)],
            salt=salt,
            environ={**os.environ, "SALT": salt},
        )
        keys.append(run_setup(settings, request).fingerprint)
    return keys
