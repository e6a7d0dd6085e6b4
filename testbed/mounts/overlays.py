"""Overlays as containers have them."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.blob.tree import Tree
from bootseer.linux import namespaces
from bootseer.linux.overlay import mount_layers
from bootseer.snapshots.layers import Layers


@contextlib.contextmanager
def overlay(
    lower: Path, options: str = "", tree: Callable[[], Tree] | None = None
) -> Iterator[Layers]:
    """Mount a new overlay over `lower` in a folder beside it, until the end of the block.

    `options` begin with a comma.
    """
    base = Path(tempfile.mkdtemp(dir=lower.parent))
    for name in ("upper", "work", "root"):
        (base / name).mkdir()
    root = base / "root"
    mount_layers([lower], base, root, options=options)
    try:
        yield Layers(root, base / "upper", lower, tree)
    finally:
        namespaces.unmount(root)
        shutil.rmtree(base)
