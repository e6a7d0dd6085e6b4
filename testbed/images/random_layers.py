"""Random layers over few names, so that names collide; containerd accepts all of them.

Layers that containerd refuses, and on which other programs disagree, are left out; `zoo` has an
image for each.
"""

import random

from testbed.images.odd_tars import END, TIME, block

LAYER_COUNT = 4
_FOLDERS = (b"", b"a/", b"b/", b"a/b/", b"b/a/", b"c/")
_NAMES = (b"a", b"b", b"c", b"d")
_OPAQUE = b".wh..opq"
_MODES = (0o644, 0o755, 0o700, 0o4711, 0o1777)


def random_layers(seed: int, tree_count: int) -> list[bytes]:
    """Return `LAYER_COUNT` tars, the lowest first, with `tree_count` trees in them."""
    chance = random.Random(seed)
    layers = [b""] * LAYER_COUNT
    for number in range(tree_count):
        tree = _Tree(chance, b"%03d/" % number)
        for layer in range(LAYER_COUNT):
            layers[layer] += tree.layer(layer)
    return [tar + END for tar in layers]


class _Tree:
    """Random tree, generated layer by layer."""

    def __init__(self, chance: random.Random, top: bytes) -> None:
        self._chance = chance
        self._top = top
        self._no_folders: set[bytes] = set()
        """Paths that were no folders in some layer below."""
        self._opaque: set[bytes] = set()
        """Folders that were opaque in this or some lower layer."""
        self._links: set[bytes] = set()
        """Paths that were symbolic links, or hard links to them, in some layer."""
        self._kinds: dict[bytes, bytes] = {}
        """Type flag of each path of this layer; w for a whiteout."""
        self._whited: set[bytes] = set()

    def layer(self, number: int) -> bytes:
        """Return the members of the next layer."""
        self._kinds = {}
        self._whited = set()
        # The lowest layer has nothing to hide. containerd requires whiteouts to come first.
        tar = b"".join(self._whiteout() for _ in range(self._chance.randrange(3 if number else 1)))
        tar += b"".join(
            self._member(b"%d.%d" % (number, n)) for n in range(self._chance.randrange(7))
        )
        self._no_folders |= {path for path, kind in self._kinds.items() if kind != b"5"}
        return tar

    def _may_imply(self, path: bytes) -> bool:
        for folder in _above(path):
            if folder in self._kinds:
                continue
            # Where a lower layer has a file, containerd makes an implied folder, but no folder
            # inside it.
            if any(p in self._no_folders for p in _above(folder)):
                return False
            # Programs disagree on the attributes of a folder that is implied where other layers'
            # are hidden or where a link was.
            if any((folder + b"/").startswith(p) for p in self._opaque) or folder in self._links:
                return False
        return True

    def _imply(self, path: bytes) -> None:
        for folder in _above(path):
            self._kinds.setdefault(folder, b"5")

    def _whiteout(self) -> bytes:
        folder, name = self._chance.choice(_FOLDERS), self._chance.choice((*_NAMES, _OPAQUE))
        path = folder + name
        # A whited-out name has nothing below it to hide, and is not whited out twice.
        if any((path + b"/").startswith(hidden + b"/") for hidden in self._whited):
            return b""
        if any((known + b"/").startswith(path + b"/") for known in self._kinds):
            return b""
        if not self._may_imply(path):
            return b""
        if name != _OPAQUE:
            self._whited.add(path)
        elif any(known.startswith(folder) for known in self._kinds):
            return b""
        else:
            self._opaque.add(folder)
        self._imply(path)
        self._kinds[path] = b"w"
        return block(self._top + folder + b".wh." + name)

    def _member(self, content: bytes) -> bytes:
        chance, kinds = self._chance, self._kinds
        path = chance.choice(_FOLDERS) + chance.choice(_NAMES)
        if any(kinds.get(p, b"5") != b"5" for p in _above(path)) or not self._may_imply(path):
            return b""
        kind = chance.choice((b"0", b"0", b"5", b"5", b"2", b"1", b"6"))
        # Programs disagree on a folder in the place of a whiteout.
        if kind == b"5" and path in self._whited:
            return b""
        # containerd sets folders' times at the end, also on names that are no longer folders.
        if kind != b"5" and kinds.get(path) == b"5":
            return b""
        link = b""
        if kind == b"2":
            # Dangling links only: loops and links to folders have images of their own.
            link = chance.choice((b"absent", b"../absent", b"/absent"))
        if kind == b"1":
            targets = sorted(p for p, k in kinds.items() if k in (b"0", b"2", b"6") and p != path)
            if not targets:
                return b""
            link = self._top + chance.choice(targets)
        self._imply(path)
        kinds[path] = b"0" if kind == b"1" else kind
        if kind in (b"1", b"2"):
            self._links.add(path)
        return block(
            self._top + path,
            kind,
            content if kind == b"0" else b"",
            mode=chance.choice(_MODES),
            uid=chance.randrange(5),
            gid=chance.randrange(5),
            mtime=TIME + chance.randrange(1000),
            link=link,
        )


def _above(path: bytes) -> list[bytes]:
    """Return the folders on the way to `path`, the outermost first."""
    parts = path.split(b"/")
    return [b"/".join(parts[: count + 1]) for count in range(len(parts) - 1)]
