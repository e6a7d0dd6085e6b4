"""Only whole images are visible: damaged layers, killed and interrupted indexers, full disks."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import CorruptError, NoSpaceError, NotFoundError
from bootseer.prefetch.index.catalogue import find_image, list_images, load_tree
from bootseer.prefetch.index.records import LAYER_FORM
from bootseer.prefetch.publish import indexing
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.store import Store, open_store
from testbed.images.building import LayoutBuilder, Member, digest, tar_of, write_layout
from testbed.needs import MissingError
from tests.support.images.indexed import contents, index, keys


@pytest.mark.parametrize("which", ["stored digest", "diff id", "cut off"])
def test_a_damaged_layer_publishes_nothing(which: str, store: Store, tmp_path: Path) -> None:
    data = tar_of([Member("x", data=os.urandom(300_000))])
    layout = LayoutBuilder(tmp_path / "layout")
    wrong = [digest(b"other")] if which == "diff id" else None
    descriptor = layout.add_image([data], compression="gzip", diff_ids=wrong)
    assert descriptor
    layer = max(layout.directory.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    if which == "stored digest":
        stored = bytearray(layer.read_bytes())
        stored[len(stored) // 2] ^= 1
        layer.write_bytes(stored)
    elif which == "cut off":
        os.truncate(layer, layer.stat().st_size // 2)
    with pytest.raises(CorruptError):
        index(layout.directory, store, tmp_path)
    assert keys(store) == []
    assert list((tmp_path / "work").iterdir()) == []


def test_one_bad_layer_leaves_no_image(store: Store, tmp_path: Path) -> None:
    layers = [[Member(f"f{n}", data=os.urandom(200_000))] for n in range(6)]
    layout = write_layout(tmp_path / "layout", layers)
    layout.blob_path(digest(tar_of(layers[1]))).unlink()
    with pytest.raises(NotFoundError):
        index(layout.directory, store, tmp_path)
    assert not [key for key in keys(store) if key.startswith("images/")]
    assert_nothing_dangles(store)


def test_a_hard_link_to_nothing_is_refused(store: Store, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("x", "h", link="absent")]])
    with pytest.raises(CorruptError, match="hard link"):
        index(tmp_path / "layout", store, tmp_path)


def assert_nothing_dangles(store: Store) -> None:
    """Assert that every record names only objects that exist as a whole."""
    for info in list(store.list("layers/")):
        layer = LAYER_FORM.decode(store.read(info.path), info.path)
        blob = store.read(blob_key(layer.blob_digest))
        assert f"blake3:{content_digest(blob).hex()}" == layer.blob_digest
        assert digest(store.read(index_key(layer.index_digest))) == layer.index_digest
    for image in list_images(store):
        assert digest(store.read(index_key(image.index_digest))) == image.index_digest
        for part in image.layers:
            assert store.size(blob_key(part.blob_digest)) == part.blob_size_bytes


INDEXER = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from bootseer.prefetch.publish import indexing
    from bootseer.prefetch.sources import open_source
    from bootseer.store import Store, open_store

    source, store, work, deadly, moment = sys.argv[1:]
    publish = Store.publish
    count = 0

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def pieces(data):
        yield data if isinstance(data, bytes) else next(iter(data))
        die()

    def deadly_publish(self, key, data, *, replace=False):
        global count
        count += 1
        if count != int(deadly):
            return publish(self, key, data, replace=replace)
        if moment == "within":
            data = pieces(data)
        done = publish(self, key, data, replace=replace)
        die()

    Store.publish = deadly_publish
    with open_source(source, Path(work)) as image, open_store(store) as opened:
        indexing.WORKERS = 1
        indexing.index_image(image, opened, Path(work))
""")


def indexer(tmp_path: Path, deadly: int = 0, moment: str = "") -> list[str]:
    """Return a command that kills itself at a moment of its publish number `deadly`."""
    places = [str(tmp_path / name) for name in ("layout", "store", "work")]
    return [sys.executable, "-c", INDEXER, *places, str(deadly), moment]


@pytest.mark.parametrize("moment", ["within", "after"])
def test_killed_at_every_step(moment: str, tmp_path: Path) -> None:
    layers = [[Member(f"f{n}", data=os.urandom(300_000))] for n in range(2)]
    write_layout(tmp_path / "layout", layers, compression="gzip", tag="t")
    with open_store(str(tmp_path / "store")) as store:
        # Each time from an empty store: blob, index and record of two layers, then of the image.
        for deadly in range(1, 9):
            for key in keys(store):
                store.delete(key)
            child = subprocess.run(indexer(tmp_path, deadly, moment), timeout=60, check=False)
            assert child.returncode == -signal.SIGKILL
            assert len(keys(store)) == deadly - (moment != "after")
            assert_nothing_dangles(store)
            assert list((tmp_path / "work").iterdir()) == []
        subprocess.run(indexer(tmp_path), check=True, timeout=60)
        assert_nothing_dangles(store)
        tree = load_tree(store, find_image(store, "layout:t"), tmp_path / "cache")
        assert contents(tree, store) == {layer[0].name: layer[0].data for layer in layers}


def test_two_indexers_at_once(tmp_path: Path) -> None:
    layers = [[Member(f"f{n}", data=os.urandom(500_000))] for n in range(4)]
    layout = tmp_path / "layout"
    write_layout(layout, layers, compression="gzip", tag="t")
    children = [subprocess.Popen(indexer(tmp_path)) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    with open_store(str(tmp_path / "store")) as store:
        assert_nothing_dangles(store)
        tree = load_tree(store, find_image(store, "layout:t"), tmp_path / "cache")
        assert len(contents(tree, store)) == 4


@pytest.mark.parametrize("full", ["work", "store"])
@pytest.mark.needs("root", "mount")
def test_a_full_disk(full: str, tmp_path: Path) -> None:
    small = tmp_path / full
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(small)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise MissingError(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        layers = [[Member("small", data=b"x")], [Member("f", data=os.urandom(3_000_000))]]
        write_layout(tmp_path / "layout", layers)
        with open_store(str(tmp_path / "store")) as store:
            with pytest.raises(NoSpaceError) as caught:
                index(tmp_path / "layout", store, tmp_path)
            assert os.strerror(errno.ENOSPC) in str(caught.value)
            assert_nothing_dangles(store)
            assert not list(list_images(store))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def test_interrupted_by_the_caller(store: Store, tmp_path: Path) -> None:
    layers = [[Member(f"f{n}", data=os.urandom(2_000_000))] for n in range(4)]
    write_layout(tmp_path / "layout", layers)

    def on_progress(count_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index(tmp_path / "layout", store, tmp_path, on_progress=on_progress)
    assert not list(list_images(store))
    assert_nothing_dangles(store)


def test_a_node_that_waits_long_for_another_packs_the_layer_itself(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = tar_of([Member("x", data=b"word")])
    layout = LayoutBuilder(tmp_path / "layout")
    assert layout.add_image([data])
    hex_digits = digest(data).partition(":")[2]
    lease = store.lease(f"leases/layers/{hex_digits}", ttl_s=600, owner="a node that hangs")
    assert lease is not None
    monkeypatch.setattr(indexing, "OTHER_NODE_S", 0.1)
    monkeypatch.setattr(indexing, "OTHER_NODE_POLL_S", 0.01)
    with open_source(f"oci:{layout.directory}", tmp_path / "work") as source, lease:
        record = index_image(source, store, tmp_path / "work", lessee="this node")
    assert find_image(store, record.reference) == record
    assert "it is packed here" in caplog.text
