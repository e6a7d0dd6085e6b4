"""Images are indexed: what `umoci unpack` gives, each layer once, and nothing that is not whole."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.read import BlobReader
from bootseer.blob.tree import Inode, Tree
from bootseer.content_digest import content_digest
from bootseer.errors import CorruptError, NoSpaceError, NotFoundError, UnknownFormatError
from bootseer.prefetch.catalogue import (
    find_image,
    image_key,
    layer_key,
    list_images,
    load_tree,
)
from bootseer.prefetch.indexing import index_image
from bootseer.prefetch.records import ImageRecord, decode_layer
from bootseer.prefetch.sources import open_source
from bootseer.store import Store, open_store
from tests.support.images import NASTY, Layout, Member, digest, run_tool, tar_of, write_layout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "store")) as opened:
        yield opened


def index(source: Path | str, store: Store, tmp_path: Path, **options: object) -> ImageRecord:
    with open_source(str(source), tmp_path / "work") as opened:
        return index_image(opened, store, tmp_path / "work", **options)  # type: ignore[arg-type]


def reader_of(tree: Tree, store: Store) -> BlobReader:
    def read(blob: int, offset: int, length: int) -> bytes:
        return store.read(blob_key(tree.blobs[blob].digest), offset, length)

    return BlobReader(tree, read)


def contents(tree: Tree, store: Store) -> dict[str, bytes]:
    reader = reader_of(tree, store)
    return {
        path.decode(): reader.read(number, 0, tree.inode(number).size_bytes)
        for path, number in tree.walk()
        if stat.S_ISREG(tree.mode(number))
    }


def shown(path: Path) -> tuple[object, ...]:
    """What lstat and friends show, except for times."""
    status = path.lstat()
    is_file = stat.S_ISREG(status.st_mode)
    return (
        stat.filemode(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_size if is_file else 0,
        status.st_rdev if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) else 0,
        os.readlink(path) if path.is_symlink() else "",
        content_digest(path.read_bytes()).hex() if is_file else "",
        tuple(
            (name, os.getxattr(path, name, follow_symlinks=False))
            for name in sorted(os.listxattr(path, follow_symlinks=False))
            if name != "security.selinux"
        ),
    )


def shown_in(inode: Inode) -> tuple[object, ...]:
    is_file = stat.S_ISREG(inode.mode)
    return (
        stat.filemode(inode.mode),
        inode.uid,
        inode.gid,
        inode.size_bytes if is_file else 0,
        inode.rdev,
        inode.link_target.decode(),
        inode.digest.hex() if inode.digest else "",
        tuple((name.decode(), value) for name, value in inode.xattrs),
    )


def assert_same(tree: Tree, root: Path, unpacked_ns: int) -> None:
    """The tree shows what is in `root`, file by file and attribute by attribute."""
    found = {os.fsencode(path.relative_to(root)): path for path in root.rglob("*")}
    expected = {path: number for path, number in tree.walk() if path}
    assert sorted(found) == sorted(expected)
    links: dict[int, int] = {}
    for path, number in expected.items():
        inode = tree.inode(number)
        assert shown(found[path]) == shown_in(inode), path
        status = found[path].lstat()
        # umoci leaves the time of unpacking on directories that it had to touch or imply, and
        # cuts times to 100 ns.
        if status.st_mtime_ns < unpacked_ns:
            assert status.st_mtime_ns // 100 == inode.mtime_ns // 100, path
        else:
            assert stat.S_ISDIR(inode.mode), path
        if not stat.S_ISDIR(inode.mode):
            assert status.st_nlink == tree.link_count(number), path
            assert links.setdefault(number, status.st_ino) == status.st_ino, path


REPLACED: Sequence[Sequence[Member]] = (
    (
        Member("x", data=b"file"),
        Member("y/z/file", data=b"y"),
        Member("link", "l", link="y"),
        Member("q/", "d"),
        Member("q/one", data=b"1"),
        Member("q/two", data=b"2"),
    ),
    (
        Member("x/", "d", mode=0o700),
        Member("x/inside", data=b"directory over file"),
        Member("y", data=b"file over directory"),
        Member("link", data=b"file over link"),
        Member("q/.wh.one"),
        Member("q/one", data=b"again"),
    ),
    (
        Member(".wh.x"),
        Member("y/", "d"),
        Member("y/new", data=b"directory again"),
        Member("./q/./three", "h", link="./q/two"),
    ),
    (Member(".wh..wh..opq"), Member("all-new", data=b"an opaque root")),
)


@pytest.mark.skipif(os.geteuid() != 0, reason="umoci needs root for owners and devices")
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize(
    "layers", [NASTY, NASTY[:1], NASTY[:2], REPLACED[:1], REPLACED[:2], REPLACED[:3], REPLACED]
)
def test_the_same_tree_as_umoci(
    layers: Sequence[Sequence[Member]], compression: str, store: Store, tmp_path: Path
) -> None:
    layout = tmp_path / "layout"
    write_layout(layout, layers, compression="gzip", tag="t")
    started_ns = time.time_ns() - 10**9
    run_tool("umoci", "unpack", "--image", f"{layout}:t", tmp_path / "bundle")
    if compression != "gzip":
        # This umoci does not read zstd; the tree must be the same.
        shutil.rmtree(layout)
        write_layout(layout, layers, compression=compression, tag="t")
    record = index(layout, store, tmp_path)
    tree = load_tree(store, record, tmp_path / "cache")
    assert_same(tree, tmp_path / "bundle/rootfs", started_ns)
    found = contents(tree, store)
    for path, data in found.items():
        assert (tmp_path / "bundle/rootfs" / path).read_bytes() == data


def test_layers_are_packed_once(store: Store, tmp_path: Path) -> None:
    base = tar_of([Member("base", data=os.urandom(100_000))])
    layout = Layout(tmp_path / "layout")
    layout.add_image([base, tar_of([Member("a", data=b"a")])], tag="a", compression="gzip")
    layout.add_image([base, tar_of([Member("b", data=b"b")])], tag="b", compression="zstd")
    seen: list[tuple[str, bool]] = []
    lock = threading.Lock()

    def on_layer(record: object, reused: bool) -> None:
        with lock:
            seen.append((record.digest, reused))  # type: ignore[attr-defined]

    counts: list[int] = []
    first = index(f"oci:{layout.directory}:a", store, tmp_path, on_layer=on_layer)
    assert dict(seen)[digest(base)] is False
    # Another compression of the same layer is the same layer.
    second = index(
        f"oci:{layout.directory}:b", store, tmp_path, on_layer=on_layer, on_progress=counts.append
    )
    assert seen.count((digest(base), True)) == 1
    assert first.layers[0] == second.layers[0]
    manifests = [entry["size"] for entry in layout.manifests]
    assert len(manifests) == 2
    assert {record.reference for record in list_images(store)} == {"layout:a", "layout:b"}
    assert sum(counts) > 0


def test_the_same_layer_twice_in_one_image(store: Store, tmp_path: Path) -> None:
    layer = [Member("x", data=b"x" * 5000)]
    write_layout(tmp_path / "layout", [layer, [Member(".wh.x")], layer, layer])
    record = index(tmp_path / "layout", store, tmp_path)
    tree = load_tree(store, record, tmp_path / "cache")
    assert contents(tree, store) == {"x": b"x" * 5000}
    assert len(tree.blobs) == 1


def test_indexing_again_gives_the_same_index(store: Store, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", NASTY)
    first = index(tmp_path / "layout", store, tmp_path)
    again = index(tmp_path / "layout", store, tmp_path)
    with open_store(str(tmp_path / "elsewhere")) as other:
        elsewhere = index(tmp_path / "layout", other, tmp_path)
    assert first.index_digest == again.index_digest == elsewhere.index_digest


def test_what_is_gone_or_damaged_in_the_store_is_written_again(
    store: Store, tmp_path: Path
) -> None:
    write_layout(tmp_path / "layout", [[Member("x", data=os.urandom(50_000))]])
    record = index(tmp_path / "layout", store, tmp_path)
    layer = record.layers[0]
    stored = decode_layer(store.read(layer_key(layer.digest)), "x")
    blob = store.read(blob_key(layer.blob_digest))
    layer_index = store.read(index_key(stored.index_digest))
    for key, data in (
        (blob_key(layer.blob_digest), None),
        (blob_key(layer.blob_digest), blob[:-1]),
        (index_key(stored.index_digest), None),
        (index_key(stored.index_digest), b"garbage"),
    ):
        store.delete(key)
        if data is not None:
            store.publish(key, data)
        assert index(tmp_path / "layout", store, tmp_path).index_digest == record.index_digest
        assert store.read(blob_key(layer.blob_digest)) == blob
        assert store.read(index_key(stored.index_digest)) == layer_index


def test_a_layer_record_of_a_later_release_is_not_overwritten(store: Store, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("x")]])
    record = index(tmp_path / "layout", store, tmp_path)
    key = layer_key(record.layers[0].digest)
    later = store.read(key).replace(b'"version": 1', b'"version": 9')
    store.publish(key, later, replace=True)
    with pytest.raises(UnknownFormatError, match="version 9"):
        index(tmp_path / "layout", store, tmp_path)
    assert store.read(key) == later


def test_an_image_record_of_a_later_release_is_not_overwritten(
    store: Store, tmp_path: Path
) -> None:
    write_layout(tmp_path / "layout", [[Member("x")]])
    key = image_key(index(tmp_path / "layout", store, tmp_path).reference)
    later = store.read(key).replace(b'"version": 1', b'"version": 9')
    store.publish(key, later, replace=True)
    with pytest.raises(UnknownFormatError, match="version 9"):
        index(tmp_path / "layout", store, tmp_path)
    assert store.read(key) == later
    store.publish(key, b"damaged", replace=True)
    index(tmp_path / "layout", store, tmp_path)


def test_a_directory_is_one_layer(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "rootfs"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(b"x" * 200_000)
    (root / ".wh.plain").write_text("only a name here")
    os.link(root / "bin/tool", root / "bin/again")
    record = index(root, store, tmp_path)
    tree = load_tree(store, record, tmp_path / "cache")
    assert record.reference == "rootfs"
    assert record.identity == tree.blobs[0].stream_digest
    assert record.size_bytes == 200_000 + len("only a name here")
    assert contents(tree, store)[".wh.plain"] == b"only a name here"
    assert index(root, store, tmp_path).index_digest == record.index_digest
    (root / "bin/new").write_text("new")
    assert index(root, store, tmp_path).index_digest != record.index_digest


def keys(store: Store) -> list[str]:
    return [info.path for info in store.list()]


@pytest.mark.parametrize("which", ["stored digest", "diff id", "cut off"])
def test_a_damaged_layer_publishes_nothing(which: str, store: Store, tmp_path: Path) -> None:
    data = tar_of([Member("x", data=os.urandom(300_000))])
    layout = Layout(tmp_path / "layout")
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
    """Every record names only what is there, whole."""
    for info in list(store.list("layers/")):
        layer = decode_layer(store.read(info.path), info.path)
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
    from bootseer.prefetch.indexing import index_image
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
        index_image(image, opened, Path(work), workers=1)
""")


def indexer(tmp_path: Path, deadly: int = 0, moment: str = "") -> list[str]:
    """A command that kills itself at a moment of the publish number `deadly`."""
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


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
@pytest.mark.parametrize("full", ["work", "store"])
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
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
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
