"""An image in containerd's content store, which is found by its layers.

The store is a folder with blobs under their digests, as an OCI layout has them, but without an
index: what is an image, and which, only looking tells. Nothing in it says what an image is called.
Edge module; any thread.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, from_oserror
from bootseer.prefetch.index.chains import chain_ids
from bootseer.prefetch.sources.layout import Image, read_image
from bootseer.prefetch.sources.model import ImageSource
from bootseer.prefetch.sources.oci_layout import open_regular, opener_in
from bootseer.registry.documents import DOCUMENT_BYTES_MAX, Descriptor


def open_content(directory: Path, chain_id: str) -> ImageSource:
    """The image whose layers make the chain `chain_id`; its reference is made of its digest.

    Raises: NotFoundError where there is none, or its documents are gone; PermissionDeniedError.
    """
    for digest, size_bytes in _documents(directory):
        image = _image(directory, Descriptor(digest, size_bytes))
        if image is not None and chain_id in chain_ids(image.config.diff_ids)[-1:]:
            name = f"containerd/{image.identity}"
            config, layers = image.config, image.layers
            return ImageSource(name, image.identity, config, layers, manifest_digest=digest)
    raise NotFoundError(f"no image in {directory} has the chain of layers {chain_id}")


def _image(directory: Path, manifest: Descriptor) -> Image | None:
    try:
        return read_image(opener_in(directory), manifest, str(directory))
    except BootseerError:
        # Not a manifest, or one whose configuration containerd has removed.
        return None


def _documents(directory: Path) -> Iterator[tuple[str, int]]:
    """(digest, size in bytes) of what may be a manifest, the newest first."""
    folder = directory / "blobs" / "sha256"
    try:
        with os.scandir(folder) as entries:
            found = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
    except OSError as error:
        raise from_oserror(error, f"look for images in {folder}") from error
    found.sort(key=lambda each: -each[0].st_mtime_ns)
    for status, name in found:
        if status.st_size <= DOCUMENT_BYTES_MAX and _begins_as_json(folder / name):
            yield f"sha256:{name}", status.st_size


def _begins_as_json(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(1) == b"{"
    except (OSError, BootseerError):
        return False
