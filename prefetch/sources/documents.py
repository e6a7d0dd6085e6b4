"""The OCI documents of one image, and the one walk from an index to configuration and layers.

Follows the OCI image specification, and Docker's schema 2, which differs only in media types.
`registry.documents` parses indexes and picks the platform. Every document is compared with the
digest that names it before it is parsed, and every type, count and size in it is checked.

Pure but for the `OpenFile` that a caller passes; any thread.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, BinaryIO

from msgspec import Meta, Struct, field

from bootseer.base.documents import Digest, DocumentFormat, Text
from bootseer.errors import CorruptError, InvalidInputError, NotFoundError
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.sources.model import TarLayer, layer_count_checked
from bootseer.registry.documents import (
    DOCUMENT_BYTES_MAX,
    ENTRY_COUNT_MAX,
    Descriptor,
    DescriptorForm,
    Document,
    manifest_for_this_machine,
    parse_index,
    parse_second_schema,
    pick_platform,
    verified,
)

LAYER_COUNT_MAX = 1000
"""Most layers of an image; overlayfs takes at most 500 layers, Docker 127."""
_Words = Annotated[tuple[Text, ...], Meta(max_length=ENTRY_COUNT_MAX)]

OpenFile = Callable[[str], BinaryIO]
"""Opens a file of a layout by its path in the layout. Raises: NotFoundError."""


# ---- parsing ---------------------------------------------------------------------------------


class ImageManifest(Struct, frozen=True):
    """The manifest of one image: its configuration, and its layers from the lowest up."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


class _ManifestDocument(Struct, frozen=True):
    config: DescriptorForm
    layers: Annotated[tuple[DescriptorForm, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


class _ProcessDocument(Struct, frozen=True, rename="pascal"):
    env: _Words = ()
    entrypoint: _Words = ()
    cmd: _Words = ()
    working_dir: Text = ""
    user: Text = ""


class _RootFs(Struct, frozen=True):
    diff_ids: Annotated[tuple[Digest, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


class _ConfigDocument(Struct, frozen=True):
    rootfs: _RootFs
    config: _ProcessDocument = _ProcessDocument()
    architecture: Text = ""


class ArchivedImage(Struct, frozen=True, rename="pascal"):
    """Entry of the `manifest.json` of `docker save`: paths in the archive, and names."""

    config: Text = ""
    tags: _Words = field(name="RepoTags", default=())
    layers: Annotated[tuple[Text, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


def _form(kind: Any, what: str) -> DocumentFormat[Any]:
    return DocumentFormat(type=kind, what=what, size_max=DOCUMENT_BYTES_MAX, is_foreign=True)


_MANIFEST: DocumentFormat[_ManifestDocument] = _form(_ManifestDocument, "the manifest of an image")
_CONFIG: DocumentFormat[_ConfigDocument] = _form(_ConfigDocument, "the configuration of an image")
_ARCHIVE: DocumentFormat[list[ArchivedImage]] = _form(
    Annotated[list[ArchivedImage], Meta(max_length=ENTRY_COUNT_MAX)], "a list of images"
)


def parse_manifest(data: bytes, where: str) -> ImageManifest:
    """Parse the manifest of an image. Raises: CorruptError, UnknownFormatError."""
    manifest = parse_second_schema(_MANIFEST, data, where)
    layers = tuple(layer.checked(where) for layer in manifest.layers)
    return ImageManifest(manifest.config.checked(where), layers)


def parse_config(data: bytes, where: str) -> ImageConfig:
    """Parse the configuration of an image.

    Raises: CorruptError; InvalidInputError if it does not configure a container image.
    """
    document = _CONFIG.parse(data, where)
    rootfs = document.get("rootfs") if isinstance(document, dict) else {"type": "layers"}
    if not isinstance(rootfs, dict) or rootfs.get("type") != "layers":
        raise InvalidInputError(f"{where} is an artifact without a root file system, not an image")
    config = _CONFIG.convert(document, where)
    run = config.config
    return ImageConfig(
        env=run.env,
        entrypoint=run.entrypoint,
        cmd=run.cmd,
        working_dir=run.working_dir,
        user=run.user,
        architecture=config.architecture,
        diff_ids=config.rootfs.diff_ids,
    )


def parse_archive_manifest(data: bytes, where: str) -> list[ArchivedImage]:
    """Parse the `manifest.json` of `docker save`. Raises: CorruptError."""
    return _ARCHIVE.decode(data, where)


# ---- from a document to an image -------------------------------------------------------------


class Image(Struct, frozen=True):
    """Image for a single platform."""

    identity: str
    """Digest of the configuration."""
    config: ImageConfig
    layers: Sequence[TarLayer]


def image_of(
    manifest: ImageManifest, config: bytes, open_layer: Callable[[Descriptor], BinaryIO], where: str
) -> Image:
    """Return the image with this manifest and this configuration, verified and encoded.

    `open_layer` opens a layer's stored bytes. Raises: CorruptError, InvalidInputError.
    """
    parsed = parse_config(config, f"{where}: configuration {manifest.config.digest}")
    layer_count_checked(len(manifest.layers), parsed, where)
    layers = [
        TarLayer(diff_id, layer.size_bytes, layer.digest, partial(open_layer, layer))
        for layer, diff_id in zip(manifest.layers, parsed.diff_ids, strict=True)
    ]
    return Image(manifest.config.digest, parsed, layers)


def read_document(open_file: OpenFile, path: str, where: str) -> bytes:
    """Read a small file whole. Raises: CorruptError if the file is too large; NotFoundError."""
    with open_file(path) as file:
        data = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise CorruptError(f"{where}: {path} is larger than {DOCUMENT_BYTES_MAX} bytes")
    return data


def read_image(open_file: OpenFile, manifest: Descriptor, where: str) -> Image:
    """Read the image of a layout that has this manifest.

    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    return _read_manifest(open_file, _read_blob(open_file, where, manifest), where)


def _read_manifest(open_file: OpenFile, document: Document, where: str) -> Image:
    manifest = parse_manifest(document.data, f"{where}: manifest {document.digest}")
    config = _read_blob(open_file, where, manifest.config).data
    return image_of(manifest, config, lambda layer: open_file(_blob_path(layer.digest)), where)


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)


def _read_blob(open_file: OpenFile, where: str, descriptor: Descriptor) -> Document:
    data = read_document(open_file, _blob_path(descriptor.digest), where)
    return Document(descriptor.digest, descriptor.media_type, verified(data, descriptor, where))


def read_layout(open_file: OpenFile, tag: str, where: str) -> tuple[str, Image]:
    """Read the image called `tag` from a layout, or its only image if `tag` is empty.

    Follows `index.json` through nested indexes to the manifest for this machine's platform.

    Returns: The image's tag in the layout, and the image.
    Raises: NotFoundError, InvalidInputError, CorruptError, UnknownFormatError.
    """
    entries = parse_index(read_document(open_file, "index.json", where), f"{where}/index.json")
    chosen = _entries_of(entries, tag, where)
    name = chosen[0].tag

    fetch = partial(_read_blob, open_file, where)
    first = fetch(pick_platform(chosen, where) if len(chosen) > 1 else chosen[0])
    return name, _read_manifest(open_file, manifest_for_this_machine(first, fetch, where), where)


def _entries_of(entries: Sequence[Descriptor], tag: str, where: str) -> Sequence[Descriptor]:
    """Return the entries of one image: several if the index lists its platforms directly."""
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
