"""An OCI image layout, wherever its files lie: in a directory or inside an archive.

Pure but for the `OpenFile` it is given. Follows index.json through nested indexes to this
machine's manifest, verifying each document against the digest that names it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO

from msgspec import Struct

from bootseer.errors import CorruptError, InvalidInputError, NotFoundError
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.documents import Manifest, parse_config, parse_manifest
from bootseer.prefetch.sources.model import TarLayer, layer_count_checked
from bootseer.registry.documents import (
    DOCUMENT_BYTES_MAX,
    Descriptor,
    Document,
    manifest_for_this_machine,
    parse_index,
    pick_platform,
    verified,
)

OpenFile = Callable[[str], BinaryIO]
"""Opens a file by its path in the layout. Raises: NotFoundError."""


def read_document(open_file: OpenFile, path: str, where: str) -> bytes:
    """A whole small file. Raises: CorruptError where it is not small; NotFoundError."""
    with open_file(path) as file:
        data = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise CorruptError(f"{where}: {path} is larger than {DOCUMENT_BYTES_MAX} bytes")
    return data


def blob_path(digest: str) -> str:
    """Returns the path in a layout of the blob `digest`, which was checked to be one."""
    return "blobs/" + digest.replace(":", "/", 1)


class Image(Struct, frozen=True):
    """One image for one platform."""

    identity: str
    """The configuration's digest."""
    config: ImageConfig
    layers: Sequence[TarLayer]


def read_image(open_file: OpenFile, descriptor: Descriptor, where: str) -> Image:
    """Return the image whose manifest is this blob.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    return _image_of(open_file, _document(open_file, where, descriptor), where)


def image_of(
    manifest: Manifest, config: bytes, open_layer: Callable[[Descriptor], BinaryIO], where: str
) -> Image:
    """Return the image with this manifest and the configuration that it names.

    `open_layer` opens a layer's stored bytes. Raises: CorruptError, InvalidInputError.
    """
    parsed = parse_config(config, f"{where}: configuration {manifest.config.digest}")
    layer_count_checked(len(manifest.layers), parsed, where)
    layers = [
        TarLayer(diff_id, layer.size_bytes, layer.digest, partial(open_layer, layer))
        for layer, diff_id in zip(manifest.layers, parsed.diff_ids, strict=True)
    ]
    return Image(manifest.config.digest, parsed, layers)


def _image_of(open_file: OpenFile, document: Document, where: str) -> Image:
    manifest = parse_manifest(document.data, f"{where}: manifest {document.digest}")
    config = _document(open_file, where, manifest.config).data
    return image_of(manifest, config, lambda layer: open_file(blob_path(layer.digest)), where)


def _document(open_file: OpenFile, where: str, descriptor: Descriptor) -> Document:
    data = read_document(open_file, blob_path(descriptor.digest), where)
    return Document(descriptor.digest, descriptor.media_type, verified(data, descriptor, where))


def reference_of(tag: str, base: str) -> str:
    """What the image of that tag in a layout called `base` is called."""
    # A tag is either a whole name ("docker.io/library/python:3.12") or only the part after ":".
    if "/" in tag or ":" in tag:
        return tag
    return f"{base}:{tag}" if tag else base


def read_layout(open_file: OpenFile, tag: str, where: str) -> tuple[str, Image]:
    """(tag, image) of the image called `tag`, or of the only one when `tag` is empty.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    entries = parse_index(read_document(open_file, "index.json", where), f"{where}/index.json")
    chosen = _pick_tag(entries, tag, where)
    name = chosen[0].tag

    fetch = partial(_document, open_file, where)
    first = fetch(pick_platform(chosen, where) if len(chosen) > 1 else chosen[0])
    return name, _image_of(open_file, manifest_for_this_machine(first, fetch, where), where)


def _pick_tag(entries: Sequence[Descriptor], tag: str, where: str) -> Sequence[Descriptor]:
    """The entries of one image: several where an index lists platforms directly."""
    if not entries:
        raise InvalidInputError(f"{where} holds no image")
    if tag:
        found = [entry for entry in entries if tag in (entry.tag, entry.digest)]
        if not found:
            raise NotFoundError(f"{where} has no image {tag!r}; it has {_tags(entries)}")
        return found
    if len({entry.tag for entry in entries}) > 1:
        raise InvalidInputError(
            f"{where} holds several images; choose one of {_tags(entries)} as oci:DIR:TAG"
        )
    return entries


def _tags(entries: Sequence[Descriptor]) -> str:
    tags = sorted({entry.tag or entry.digest for entry in entries})
    return ", ".join(tags[:20]) + (" and more" if len(tags) > 20 else "")
