"""A root file system in a directory, as one layer: `docker export`, debootstrap, a chroot.

Nothing about a directory says beforehand what is in it, so it is read whole at every indexing;
the same contents give the same blob, which the store then has already.
"""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from bootseer.blob.pack.packing import pack_directory, tar_directory
from bootseer.errors import NotFoundError
from bootseer.prefetch.index.merge import LayerTree
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.model import ImageSource, Sink, name_of


class DirectoryLayer(Struct, frozen=True):
    """Implements `Layer`."""

    root: Path

    @property
    def digest(self) -> str | None:
        """Returns None: it is not known before packing."""
        return None

    @property
    def size_bytes(self) -> int | None:
        """Returns None: it is not known before packing."""
        return None

    @property
    def registry_digest(self) -> str | None:
        """See `Layer.registry_digest`."""
        return None

    def pack(self, sink: BinaryIO, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pack`."""
        # What is mounted below (/proc, volumes) is not part of an image.
        tree = pack_directory(self.root, sink, one_file_system=True, on_progress=on_progress)
        return LayerTree(tree, is_changeset=False)

    def pull(self, sink: Sink, on_progress: Callable[[int], None]) -> LayerTree:
        """See `Layer.pull`."""
        tree = tar_directory(self.root, sink, one_file_system=True, on_progress=on_progress)
        return LayerTree(tree, is_changeset=False)


def open_directory(root: Path) -> ImageSource:
    """Raises: NotFoundError."""
    if not root.is_dir():
        raise NotFoundError(f"there is no directory {root}")
    return ImageSource(name_of(root), None, ImageConfig(), [DirectoryLayer(root)])
