"""Merging of layers into one tree, as the OCI image specification says ("Applying Changesets").

Rules for whiteouts, opaque directories and hard links between layers:

- A name replaces any name of lower layers at its path. Only a directory over a directory keeps the
  lower contents and sets new attributes; a directory without an entry of its own (`usr/` of
  `usr/bin/x`) keeps the attributes as well.
- Whiteouts apply to lower layers only, wherever they stand in the layer's tar: a name that a layer
  whites out and creates exists afterwards.
- A directory over a symbolic link replaces the link, even without an entry of its own, as overlayfs
  does. (Tools that extract in place would follow the link.)
- A hard link to a name that only lower layers have is another name of that inode.
- The root's own attributes, trusted xattrs and times before 1970 are left out, as by containerd.

Pure (no I/O).
"""

import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.base.display import quoted
from bootseer.blob.gather import CombinedInodes, Selection
from bootseer.blob.tree import Inode, Tree
from bootseer.blob.xattr_codec import Xattrs
from bootseer.errors import CorruptError

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
_AUFS_PREFIX = b".wh..wh."
"""Prefix of the files that Aufs keeps for itself, such as `.wh..wh.plnk`; no engine shows them."""
_TRUSTED = b"trusted."
_AFTER_WHITEOUT = b".wh/"
"""Sorts right behind every name with the prefix `WHITEOUT`."""

_NO_INODE = -1
"""Inode of the root until a layer has an entry for the root."""

_LINK_MODE = stat.S_IFLNK | 0o777
DEFAULT_ROOT = Inode(stat.S_IFDIR | 0o755)


class LayerTree(Struct, frozen=True):
    """Tree of a single layer, in which whiteouts are still plain names."""

    tree: Tree
    implied: frozenset[bytes] = frozenset()
    """Paths of directories without an entry in the tar; b"" is the root."""
    links: tuple[tuple[bytes, bytes], ...] = ()
    """(path, target path in lower layers) of hard links whose target is not in this layer."""
    is_changeset: bool = True
    """False for a plain root file system, in which no name has a special meaning."""


class _MergedDirectory(Struct):
    """Directory of the merged tree. Inodes have the numbers of `CombinedInodes`."""

    inode: int
    children: dict[bytes, "int | _MergedDirectory"] = field(default_factory=dict)
    """Name -> directory, or for any other file the number of its inode."""


def merge_layers(layers: Sequence[LayerTree]) -> Tree:
    """Merge the layers of an image, from the lowest up, into one tree.

    Inodes are numbered in the order of a walk. Only blobs that a file needs are kept, in the order
    of the layers. Raises: CorruptError for a layer that cannot be applied.
    """
    if len(layers) == 1 and not layers[0].is_changeset:
        return layers[0].tree
    gathered = CombinedInodes([layer.tree for layer in layers])
    root = _MergedDirectory(_NO_INODE)
    for number, layer in enumerate(layers):
        try:
            _apply(root, gathered.first[number], layer)
        except CorruptError as error:
            name = ", ".join(blob.stream_digest for blob in layer.tree.blobs)
            where = f"layer {number + 1} of {len(layers)} ({name})"
            raise CorruptError(f"{where} cannot be applied: {error}") from error
    has_root = root.inode != _NO_INODE
    wanted = _collect(root, gathered.mtime_ns(root.inode) if has_root else 0)
    del root  # The merged directories take more memory than the tree.
    return gathered.tree(
        wanted, mode=_unpacked_mode, mtime_ns=_unpacked_time, xattrs=_unpacked_xattrs
    )


def _apply(root: _MergedDirectory, first_inode: int, layer: LayerTree) -> None:
    """Apply a layer, whose inodes have the numbers from `first_inode` on, to the merged tree."""
    tree = layer.tree
    names, inodes = tree.columns.names, tree.columns.name_inode
    directories = tree.columns.directories()
    implied = {tree.resolve(path) for path in layer.implied}
    links = _resolve_links(root, layer)
    if 0 not in implied:
        # Only the root's time is used: see `merge_layers`.
        root.inode = first_inode
    stack = [(0, root)]
    while stack:
        directory, folder = stack.pop()
        children = folder.children
        start, end = tree.span(directory)
        # The names are sorted.
        whiteout = bisect_left(names, WHITEOUT, start, end)
        no_whiteout = bisect_left(names, _AFTER_WHITEOUT, whiteout, end)
        for i in range(whiteout, no_whiteout):
            _white_out(children, names[i])
        for i in chain(range(start, whiteout), range(no_whiteout, end)):
            name, number = names[i], inodes[i]
            if number not in directories:
                children[name] = first_inode + number
                continue
            child = children.get(name)
            if child is None or isinstance(child, int):
                child = children[name] = _MergedDirectory(first_inode + number)
            elif number not in implied:
                child.inode = first_inode + number
            stack.append((number, child))
    for path, target in links.items():
        directory_path, _, name = path.rpartition(b"/")
        parent = _find(root, directory_path)
        if not isinstance(parent, _MergedDirectory):
            raise CorruptError(f"the hard link {quoted(path)} lies in no directory")
        if not name.startswith(WHITEOUT):
            parent.children[name] = target


def _white_out(lower: dict[bytes, int | _MergedDirectory], name: bytes) -> None:
    """Apply a whiteout to a directory before any other name of the whiteout's layer is added."""
    if name == OPAQUE:
        lower.clear()
    elif not name.startswith(_AUFS_PREFIX):
        hidden = name.removeprefix(WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise CorruptError(f"the whiteout {quoted(name)} names nothing that could be hidden")
        lower.pop(hidden, None)


def _resolve_links(root: _MergedDirectory, layer: LayerTree) -> Mapping[bytes, int]:
    """Return the inodes of a layer's links to lower layers by path, before its whiteouts apply."""
    found: dict[bytes, int] = {}
    for path, target in layer.links:
        inode = _find(root, target)
        if not isinstance(inode, int):
            raise CorruptError(
                f"the hard link {quoted(path)} points to {quoted(target)}, which is no file of "
                "this layer or of a lower one"
            )
        found[path] = inode
    return found


def _find(root: _MergedDirectory, path: bytes) -> "int | _MergedDirectory | None":
    node: int | _MergedDirectory | None = root
    for part in path.split(b"/") if path else ():
        node = node.children.get(part) if isinstance(node, _MergedDirectory) else None
    return node


def _collect(root: _MergedDirectory, mtime_ns: int) -> Selection:
    """List the names of the merged tree, and its inodes in the order of a walk."""
    numbers = {root.inode: 0}
    names: list[bytes] = []
    parents = array("I")
    targets: list[int] = []

    def enter(folder: _MergedDirectory) -> Iterator[int | _MergedDirectory]:
        """Append the folder's names; return its children in the order of their names."""
        ordered = sorted(folder.children)
        children = [folder.children[name] for name in ordered]
        names.extend(ordered)
        parents.extend(repeat(numbers[folder.inode], len(ordered)))
        targets.extend(c if isinstance(c, int) else c.inode for c in children)
        return iter(children)

    stack = [enter(root)]
    while stack:
        for child in stack[-1]:
            if isinstance(child, int):
                numbers.setdefault(child, len(numbers))
                continue
            numbers[child.inode] = len(numbers)
            stack.append(enter(child))
            break
        else:
            stack.pop()
    return Selection(
        replace(DEFAULT_ROOT, mtime_ns=mtime_ns),
        array("I", islice(numbers, 1, None)),
        names,
        parents,
        map(numbers.__getitem__, targets),
    )


def _unpacked_mode(mode: int) -> int:
    # Linux keeps no permissions of symbolic links, but a tar may state some.
    return _LINK_MODE if stat.S_ISLNK(mode) else mode


def _unpacked_time(mtime_ns: int) -> int:
    return max(mtime_ns, 0)


def _unpacked_xattrs(xattrs: Xattrs) -> Xattrs:
    # Images are mounted under overlayfs, which would obey its own xattrs, `trusted.overlay.*`.
    return tuple(xattr for xattr in xattrs if not xattr[0].startswith(_TRUSTED)) if xattrs else ()
