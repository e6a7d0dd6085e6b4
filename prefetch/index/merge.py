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
_BOOKKEEPING = b".wh..wh."
"""Aufs's own files (`.wh..wh.plnk`); no tool that applies layers shows them."""
_TRUSTED = b"trusted."
_AFTER_WHITEOUT = b".wh/"
"""Sorts right behind all names that begin as whiteouts do."""

_NO_INODE = -1
"""The inode of the root, until a layer has an entry for it."""

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


class _Folder(Struct):
    """A directory of the merged tree. Inodes have the numbers of `CombinedInodes`."""

    inode: int
    children: dict[bytes, "int | _Folder"] = field(default_factory=dict)
    """Name -> what is no directory, as its inode's number, or a directory."""


def merge(layers: Sequence[LayerTree]) -> Tree:
    """The tree of an image whose layers these are, the lowest first.

    Inodes are numbered in the order of a walk; only blobs that some file needs are kept, in the
    order of the layers. Raises: CorruptError for a layer that cannot be applied.
    """
    if len(layers) == 1 and not layers[0].is_changeset:
        return layers[0].tree
    gathered = CombinedInodes([layer.tree for layer in layers])
    root = _Folder(_NO_INODE)
    for number, layer in enumerate(layers):
        try:
            _apply(root, gathered.first[number], layer)
        except CorruptError as error:
            name = ", ".join(blob.stream_digest for blob in layer.tree.blobs)
            where = f"layer {number + 1} of {len(layers)} ({name})"
            raise CorruptError(f"{where} cannot be applied: {error}") from error
    has_root = root.inode != _NO_INODE
    wanted = _collect(root, gathered.mtime_ns(root.inode) if has_root else 0)
    # It takes more than the tree will.
    del root
    return gathered.tree(
        wanted, mode=_unpacked_mode, mtime_ns=_unpacked_time, xattrs=_unpacked_xattrs
    )


def _apply(root: _Folder, first: int, layer: LayerTree) -> None:
    """`first`: the number that the layer's root has."""
    tree = layer.tree
    names, inodes = tree.columns.names, tree.columns.name_inode
    directories = tree.columns.directories()
    implied = {tree.resolve(path) for path in layer.implied}
    links = _resolve_links(root, layer)
    if 0 not in implied:
        # Only for its time: see `merge`.
        root.inode = first
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
                children[name] = first + number
                continue
            child = children.get(name)
            if child is None or isinstance(child, int):
                child = children[name] = _Folder(first + number)
            elif number not in implied:
                child.inode = first + number
            stack.append((number, child))
    for path, target in links.items():
        directory_path, _, name = path.rpartition(b"/")
        parent = _find(root, directory_path)
        if not isinstance(parent, _Folder):
            raise CorruptError(f"the hard link {quoted(path)} lies in no directory")
        if not name.startswith(WHITEOUT):
            parent.children[name] = target


def _white_out(lower: dict[bytes, int | _Folder], name: bytes) -> None:
    """`lower` holds nothing of the whiteout's own layer yet."""
    if name == OPAQUE:
        lower.clear()
    elif not name.startswith(_BOOKKEEPING):
        hidden = name.removeprefix(WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise CorruptError(f"the whiteout {quoted(name)} names nothing that could be hidden")
        lower.pop(hidden, None)


def _resolve_links(root: _Folder, layer: LayerTree) -> Mapping[bytes, int]:
    """Path -> the lower layers' inode, before this layer's whiteouts can hide it."""
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


def _find(root: _Folder, path: bytes) -> "int | _Folder | None":
    node: int | _Folder | None = root
    for part in path.split(b"/") if path else ():
        node = node.children.get(part) if isinstance(node, _Folder) else None
    return node


def _collect(root: _Folder, mtime_ns: int) -> Selection:
    """The names of the merged tree, and its inodes in the order of a walk."""
    numbers = {root.inode: 0}
    names: list[bytes] = []
    parents = array("I")
    targets: list[int] = []

    def enter(folder: _Folder) -> Iterator[int | _Folder]:
        """List its names, which folders are entered in the order of; what they lead to."""
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
    """Linux keeps no permissions of a symbolic link, whatever a tar says."""
    return _LINK_MODE if stat.S_ISLNK(mode) else mode


def _unpacked_time(mtime_ns: int) -> int:
    return max(mtime_ns, 0)


def _unpacked_xattrs(xattrs: Xattrs) -> Xattrs:
    """Overlayfs, under which images are mounted, would take its own for orders."""
    return tuple(xattr for xattr in xattrs if not xattr[0].startswith(_TRUSTED)) if xattrs else ()
