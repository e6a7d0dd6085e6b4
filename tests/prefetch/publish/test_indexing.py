"""Indexed images equal the result of `umoci unpack`; each layer is stored once."""

import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer.base.content_digest import content_digest
from bootseer.blob.keys import blob_key, index_key
from bootseer.blob.tree import Inode, Tree
from bootseer.errors import UnknownFormatError
from bootseer.prefetch.index.catalogue import image_key, layer_key, list_images, load_tree
from bootseer.prefetch.index.records import LAYER_FORM
from bootseer.store import Store, open_store
from testbed.images.building import (
    NASTY,
    LayoutBuilder,
    Member,
    digest,
    run_tool,
    tar_of,
    write_layout,
)
from tests.support.images.indexed import contents, index, unsigned


def shown(path: Path) -> tuple[object, ...]:
    """Return the attributes of a file, except for times."""
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
    """Assert that the tree has the entries and attributes of `root`."""
    found = {os.fsencode(path.relative_to(root)): path for path in root.rglob("*")}
    expected = {path: number for path, number in tree.walk() if path}
    assert sorted(found) == sorted(expected)
    links: dict[int, int] = {}
    for path, number in expected.items():
        inode = tree.inode(number)
        assert shown(found[path]) == shown_in(inode), path
        status = found[path].lstat()
        # umoci leaves the time of unpacking on directories that it touches or implies, and rounds
        # times down to 100 ns.
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


@pytest.mark.needs("root")
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
    layout = LayoutBuilder(tmp_path / "layout")
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
    # Another compression of a layer is the same layer.
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
    stored = LAYER_FORM.decode(store.read(layer_key(layer.digest)), "x")
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
    later = json.dumps({**unsigned(store.read(key)), "version": 9}).encode()
    store.publish(key, later, replace=True)
    with pytest.raises(UnknownFormatError, match="version 9"):
        index(tmp_path / "layout", store, tmp_path)
    assert store.read(key) == later


@pytest.mark.parametrize("damage", ["cut", "flip", "kind", "list"])
def test_a_damaged_layer_record_is_written_again(store: Store, tmp_path: Path, damage: str) -> None:
    write_layout(tmp_path / "layout", [[Member("x", data=b"content")]])
    record = index(tmp_path / "layout", store, tmp_path)
    key = layer_key(record.layers[0].digest)
    right = store.read(key)
    wrong = {
        "cut": right[: len(right) // 2],
        "flip": right.replace(b'"version": 1', b'"version": 3'),
        "kind": right.replace(b"bootseer-layer", b"bootseer-lazer"),
        "list": b"[]",
    }[damage]
    store.publish(key, wrong, replace=True)
    index(tmp_path / "layout", store, tmp_path)
    assert store.read(key) == right


@pytest.mark.parametrize("has_record", [True, False])
def test_a_damaged_blob_of_the_right_size_is_made_anew(
    store: Store, tmp_path: Path, has_record: bool
) -> None:
    write_layout(tmp_path / "layout", [[Member("x", data=os.urandom(300_000))]])
    record = index(tmp_path / "layout", store, tmp_path)
    key = blob_key(record.layers[0].blob_digest)
    right = store.read(key)
    store.publish(key, bytes(len(right)), replace=True)
    if not has_record:
        store.delete(layer_key(record.layers[0].digest))
    index(tmp_path / "layout", store, tmp_path, verify=has_record)
    assert store.read(key) == right


def test_an_image_record_of_a_later_release_is_not_overwritten(
    store: Store, tmp_path: Path
) -> None:
    write_layout(tmp_path / "layout", [[Member("x")]])
    key = image_key(index(tmp_path / "layout", store, tmp_path).reference)
    later = json.dumps({**unsigned(store.read(key)), "version": 9}).encode()
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
