"""Layers into one tree, as the OCI image specification says ("Applying Changesets").

Pure (no I/O). Alone owns what whiteouts, opaque directories and hard links between layers mean.

- A name replaces what lower layers have at its path, whatever that is; only a directory over a
  directory keeps the lower contents, and gives it new attributes, unless the layer merely implies
  the directory (`usr/bin/x` without `usr/`).
- Whiteouts apply to lower layers only, wherever in the layer's tar they stand: a name that is
  whited out and created in one layer is there afterwards.
- A directory over a symbolic link replaces it, also one that is implied, as overlayfs does (tools
  that extract in place would follow the link).
- A hard link to a name that only lower layers have is another name of that inode.
- What containerd does not unpack is left out: the root's own attributes, trusted xattrs, times
  before 1970.
"""

import stat
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Inode, Tree
from bootseer.errors import CorruptError

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
_BOOKKEEPING = b".wh..wh."
"""Aufs's own files (`.wh..wh.plnk`); no tool that applies layers shows them."""
_TRUSTED = b"trusted."

_LINK_MODE = stat.S_IFLNK | 0o777
DEFAULT_ROOT = Inode(stat.S_IFDIR | 0o755)


class LayerTree(Struct, frozen=True):
    """One layer as packed: whiteouts are still plain names in it."""

    tree: Tree
    implied: frozenset[bytes] = frozenset()
    """Paths of directories that the tar has no entry for; b"" is the root."""
    links: tuple[tuple[bytes, bytes], ...] = ()
    """(path, target path in lower layers) of hard links whose target is not in this layer."""
    is_changeset: bool = True
    """False: a plain root file system, in which no name has a special meaning."""


class _Node(Struct):
    """A name in the merged tree: which layer's inode it is; `children` for directories."""

    layer: int
    inode: int
    children: dict[bytes, "_Node"] | None = None


class _Result(Struct):
    """Where the merged inodes are collected."""

    names: list[tuple[bytes, int]] = field(default_factory=list)
    inodes: list[Inode] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)


def merge(layers: Sequence[LayerTree]) -> Tree:
    """The tree of an image whose layers these are, the lowest first.

    Inodes are numbered in the order of a walk; only blobs that some file needs are kept, in the
    order of the layers. Raises: CorruptError for a layer that cannot be applied.
    """
    if len(layers) == 1 and not layers[0].is_changeset:
        return layers[0].tree
    root = _Node(-1, 0, {})
    for number, layer in enumerate(layers):
        _apply(root, number, layer)
    result = _collect(root, layers)
    # It takes more than the tree will.
    del root
    blobs, positions = _used_blobs(result, layers)
    for (layer_number, _), number in result.numbers.items():
        inode = result.inodes[number]
        if any(positions[layer_number, e.blob] != e.blob for e in inode.extents):
            extents = tuple(
                Extent(e.file_offset, positions[layer_number, e.blob], e.blob_offset, e.length)
                for e in inode.extents
            )
            result.inodes[number] = replace(inode, extents=extents)
    return build_tree(result.names, result.inodes, blobs)


def _apply(root: _Node, number: int, layer: LayerTree) -> None:
    tree = layer.tree
    implied = {tree.resolve(path) for path in layer.implied}
    links = _resolve_links(root, layer)
    if 0 not in implied:
        # Only for its time: see `_unpacked`.
        root.layer, root.inode = number, 0
    stack = [(0, root)]
    while stack:
        directory, node = stack.pop()
        children = node.children
        assert children is not None
        names = tree.children(directory)
        for entry in names:
            if entry.name.startswith(WHITEOUT):
                _white_out(children, entry.name)
        for entry in names:
            if entry.name.startswith(WHITEOUT):
                continue
            if not stat.S_ISDIR(tree.mode(entry.inode)):
                children[entry.name] = _Node(number, entry.inode)
                continue
            child = children.get(entry.name)
            if child is None or child.children is None:
                child = children[entry.name] = _Node(number, entry.inode, {})
            elif entry.inode not in implied:
                child.layer, child.inode = number, entry.inode
            stack.append((entry.inode, child))
    for path, target in links.items():
        directory_path, _, name = path.rpartition(b"/")
        parent = _find(root, directory_path)
        if parent is None or parent.children is None:
            raise CorruptError(f"the hard link {path!r} lies in no directory")
        if not name.startswith(WHITEOUT):
            parent.children[name] = _Node(target.layer, target.inode)


def _white_out(lower: dict[bytes, _Node], name: bytes) -> None:
    """`lower` holds nothing of the whiteout's own layer yet."""
    if name == OPAQUE:
        lower.clear()
    elif not name.startswith(_BOOKKEEPING):
        hidden = name.removeprefix(WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise CorruptError(f"the whiteout {name!r} names nothing that could be hidden")
        lower.pop(hidden, None)


def _resolve_links(root: _Node, layer: LayerTree) -> Mapping[bytes, _Node]:
    """Path -> the lower layers' node, before this layer's whiteouts can hide it."""
    found: dict[bytes, _Node] = {}
    for path, target in layer.links:
        node = _find(root, target)
        if node is None or node.children is not None:
            raise CorruptError(
                f"the hard link {path!r} points to {target!r}, which is no file of this layer or "
                "of a lower one"
            )
        found[path] = _Node(node.layer, node.inode)
    return found


def _find(root: _Node, path: bytes) -> _Node | None:
    node: _Node | None = root
    for part in path.split(b"/") if path else ():
        node = node.children.get(part) if node is not None and node.children else None
    return node


def _collect(root: _Node, layers: Sequence[LayerTree]) -> _Result:
    result = _Result()
    stack: list[tuple[bytes, _Node]] = [(b"", root)]
    while stack:
        path, node = stack.pop()
        key = (node.layer, node.inode)
        number = result.numbers.get(key)
        if number is None:
            number = result.numbers[key] = len(result.inodes)
            known = node.layer >= 0
            inode = layers[node.layer].tree.inode(node.inode) if known else DEFAULT_ROOT
            result.inodes.append(_unpacked(inode, path))
        result.names.append((path, number))
        if node.children:
            prefix = path + b"/" if path else b""
            for name in sorted(node.children, reverse=True):
                stack.append((prefix + name, node.children[name]))
    return result


def _unpacked(inode: Inode, path: bytes) -> Inode:
    """The inode as containerd would unpack it."""
    if inode.mtime_ns < 0:
        inode = replace(inode, mtime_ns=0)
    if not path:
        return replace(DEFAULT_ROOT, mtime_ns=inode.mtime_ns)
    if any(name.startswith(_TRUSTED) for name, _ in inode.xattrs):
        # Overlayfs, under which images are mounted, would take its own for orders.
        kept = tuple(xattr for xattr in inode.xattrs if not xattr[0].startswith(_TRUSTED))
        inode = replace(inode, xattrs=kept)
    if stat.S_ISLNK(inode.mode) and inode.mode != _LINK_MODE:
        # Linux keeps no permissions of a symbolic link, whatever a tar says.
        inode = replace(inode, mode=_LINK_MODE)
    return inode


def _used_blobs(
    result: _Result, layers: Sequence[LayerTree]
) -> tuple[list[Blob], dict[tuple[int, int], int]]:
    """The blobs of the result, and (layer, its blob number) -> position among them."""
    used = {
        (layer, extent.blob)
        for (layer, _), number in result.numbers.items()
        for extent in result.inodes[number].extents
    }
    blobs: list[Blob] = []
    by_digest: dict[str, int] = {}
    positions = {}
    for layer, number in sorted(used):
        blob = layers[layer].tree.blobs[number]
        if blob.digest not in by_digest:
            by_digest[blob.digest] = len(blobs)
            blobs.append(blob)
        positions[layer, number] = by_digest[blob.digest]
    return blobs, positions
