"""Random layers over few names, so that about everything collides; all that containerd takes.

What it refuses and what the peers contest is left out; `image_zoo` has an image for each.
"""

import random

from testbed.images.odd_tars import END, TIME, block

LAYER_COUNT = 4
_FOLDERS = (b"", b"a/", b"b/", b"a/b/", b"b/a/", b"c/")
_NAMES = (b"a", b"b", b"c", b"d")
_OPAQUE = b".wh..opq"
_MODES = (0o644, 0o755, 0o700, 0o4711, 0o1777)


def random_layers(seed: int, tree_count: int) -> list[bytes]:
    """`LAYER_COUNT` tars, the lowest first, of as many trees in folders of their own."""
    chance = random.Random(seed)
    layers = [b""] * LAYER_COUNT
    for number in range(tree_count):
        tree = _Tree(chance, b"%03d/" % number)
        for layer in range(LAYER_COUNT):
            layers[layer] += tree.layer(layer)
    return [tar + END for tar in layers]


class _Tree:
    """One tree, layer by layer."""

    def __init__(self, chance: random.Random, top: bytes) -> None:
        self._chance = chance
        self._top = top
        self._no_folders: set[bytes] = set()
        """What was something else than a folder in some layer below."""
        self._opaque: set[bytes] = set()
        """Folders that were opaque in some layer, this one included."""
        self._links: set[bytes] = set()
        """What was a symbolic link, or another name of one, in some layer."""
        self._kinds: dict[bytes, bytes] = {}
        """Of this layer: path -> type flag, or w for a whiteout."""
        self._whited: set[bytes] = set()

    def layer(self, number: int) -> bytes:
        """The members of the next layer."""
        self._kinds = {}
        self._whited = set()
        # There is nothing to hide in the lowest layer. Containerd wants whiteouts first.
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
            # Where a lower layer has a file, containerd implies a folder, but none inside that.
            if any(p in self._no_folders for p in _above(folder)):
                return False
            # Whose attributes a folder gets that is only implied where others are hidden or where
            # a link was, is contested.
            if any((folder + b"/").startswith(p) for p in self._opaque) or folder in self._links:
                return False
        return True

    def _imply(self, path: bytes) -> None:
        for folder in _above(path):
            self._kinds.setdefault(folder, b"5")

    def _whiteout(self) -> bytes:
        folder, name = self._chance.choice(_FOLDERS), self._chance.choice((*_NAMES, _OPAQUE))
        path = folder + name
        # Below a name that is whited out there is nothing to hide, nor twice the same.
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
        # A folder that comes in the place of a whiteout is contested.
        if kind == b"5" and path in self._whited:
            return b""
        # Containerd sets folders' times at the end, also of those that are none any more.
        if kind != b"5" and kinds.get(path) == b"5":
            return b""
        link = b""
        if kind == b"2":
            # Dangling: loops and links to folders have images of their own.
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
    """The folders on the way to `path`, the outermost first."""
    parts = path.split(b"/")
    return [b"/".join(parts[: count + 1]) for count in range(len(parts) - 1)]
