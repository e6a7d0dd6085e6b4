"""A bundle with other pages than the image's, although all of its digests are right."""

import hashlib
import io
import shutil

import pytest
from msgspec.structs import replace

from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.format import write_bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.index.catalogue import read_tree
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.served.service import log_path
from bootseer.store import Store, open_store
from testbed.mounts.image_mounts import checksums_in_child, drop_cache, mounted
from testbed.waiting import wait_for
from tests.prefetch.mounts.conftest import IndexedDirectory, digest_of, read_hot

pytestmark = pytest.mark.needs("fuse")


def pointer_of(store: Store, node: IndexedDirectory) -> HotPointer:
    pointer = hot_store.read_pointer(store, node.record.index_digest, "train")
    assert pointer is not None
    return pointer


def replace_bundle(node: IndexedDirectory) -> HotPointer:
    """Replace the bundle's bytes, as a person who can write to the store could."""
    index = node.record.index_digest
    with open_store(node.settings.store_url) as store:
        pointer = pointer_of(store, node)
        lengths = [blob.stream_length for blob in read_tree(store, index).blobs]
        bundle = hot_store.read_bundle(store, pointer, lengths)
        parts = [io.BytesIO(), io.BytesIO()]
        frames = [frame.extents for frame in bundle.frames]
        header = write_bundle(index, frames, lambda blob, offset, length: b"!" * length, parts)
        digest = f"sha256:{hashlib.sha256(header).hexdigest()}"
        for number, part in enumerate(parts):
            store.publish(hot_store.part_key(digest, number), part.getvalue())
        store.publish(hot_store.header_key(digest), header)
        wrong = replace(pointer, bundle_digest=digest, header_bytes=len(header))
        key = hot_store.pointer_key(index, "train")
        store.publish(key, hot_store.POINTER_FORM.encode(wrong), replace=True)
    return wrong


def test_a_wrong_bundle_is_found_dropped_and_made_anew(node: IndexedDirectory) -> None:
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    wrong = replace_bundle(node)
    drop_cache(node.settings)
    settings = replace(node.settings, fill_bytes_per_s=10**9)
    hot = ["hot-1", "hot-2"]
    right = [digest_of(node.source / name) for name in hot]
    with mounted(settings, "image:1", node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        paths = [image.directory / name for name in hot]
        # Wrong pages are only found once the frames that hold them are here.
        assert checksums_in_child(paths) != right
        image.ready()
        # The background fill fetches them: the kernel's pages are dropped, too.
        wait_for(lambda: checksums_in_child(paths) == right)
        # The finder says so, or the thread that looks for what other servers have found.
        error = image.status()["prefetch"]["error"]
        assert "not those of" in error or "found wrong bytes" in error
        log = log_path(settings.run_dir, image.state.id).read_text()
        assert log.count("brought bytes that are not those of the image") == 1
    # The next start does not use it, and has it made again from the index.
    drop_streams(node)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
        assert image.status()["prefetch"] is None
    assert wait_published(node.settings, 30)
    with open_store(node.settings.store_url) as store:
        assert pointer_of(store, node).bundle_digest != wrong.bundle_digest
    drop_cache(node.settings)
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        read_hot(node, image.directory)


def test_every_server_of_the_image_drops_what_one_found_wrong(node: IndexedDirectory) -> None:
    """Also its kernel's pages, and although that server never compares anything itself."""
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    replace_bundle(node)
    drop_cache(node.settings)
    hot = ["hot-1", "hot-2"]
    right = [digest_of(node.source / name) for name in hot]
    idle = replace(node.settings, fill_bytes_per_s=0)
    filling = replace(node.settings, fill_bytes_per_s=10**9)
    with (
        mounted(idle, "image:1", node.base / "mnt") as one,
        mounted(filling, "image:1", node.base / "other") as other,
    ):
        for image in (one, other):
            wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)  # noqa: B023
        paths = [one.directory / name for name in hot]
        assert checksums_in_child(paths) != right
        other.ready()
        wait_for(lambda: checksums_in_child(paths) == right)
        assert "another server" in one.status()["prefetch"]["error"]


def drop_streams(node: IndexedDirectory) -> None:
    """Remove everything from the cache except the node's copies of bundles."""
    hot = node.settings.cache_dir / "catalogue" / "hot"
    kept = {path.name: path.read_bytes() for path in hot.iterdir()}
    drop_cache(node.settings)
    hot.mkdir(parents=True)
    for name, data in kept.items():
        (hot / name).write_bytes(data)


def test_a_bundle_of_another_store_is_not_believed(node: IndexedDirectory) -> None:
    """Also if that store has exactly the same index, so that the image is the same one."""
    with mounted(node.settings, "image:1", node.base / "mnt") as image:
        read_hot(node, image.directory)
    assert wait_published(node.settings, 30)
    shutil.copytree(node.base / "store", node.base / "good")
    good = replace(node.settings, store_url=(node.base / "good").as_uri(), fill_bytes_per_s=0)
    replace_bundle(node)
    drop_cache(node.settings)
    hostile = replace(node.settings, fill_bytes_per_s=0)
    paths = [node.base / "mnt" / name for name in ("hot-1", "hot-2")]
    right = [digest_of(node.source / path.name) for path in paths]
    with mounted(hostile, "image:1", node.base / "mnt") as image:
        wait_for(lambda: (image.status()["prefetch"] or {}).get("finished_after_s") is not None)
        assert checksums_in_child(paths) != right
    for prefetch in (True, False):
        with mounted(good, "image:1", node.base / "mnt", prefetch=prefetch):
            assert checksums_in_child(paths) == right
