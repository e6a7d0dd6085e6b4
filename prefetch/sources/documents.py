"""The JSON documents of one image, parsed and bounded: manifest and configuration.

What is read of the OCI image specification (and Docker's schema 2, which differs only in media
types) beside indexes (`registry.documents`). Pure: takes bytes, returns frozen objects. Nothing in
a document is believed: every type, count and size is checked, and digests are checked by `verified`
before a document is parsed.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from bootseer.base.documents import Digest, DocumentFormat, Text
from bootseer.errors import InvalidInputError
from bootseer.prefetch.index.records import ImageConfig
from bootseer.registry.documents import (
    DOCUMENT_BYTES_MAX,
    ENTRY_COUNT_MAX,
    Descriptor,
    DescriptorForm,
    parse_second_schema,
)

LAYER_COUNT_MAX = 1000
"""Overlayfs stops at 500, Docker at 127."""
_Words = Annotated[tuple[Text, ...], Meta(max_length=ENTRY_COUNT_MAX)]


class Manifest(Struct, frozen=True):
    """One image: its configuration and its layers, the lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


class _Manifest(Struct, frozen=True):
    config: DescriptorForm
    layers: Annotated[tuple[DescriptorForm, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


class _Process(Struct, frozen=True, rename="pascal"):
    env: _Words = ()
    entrypoint: _Words = ()
    cmd: _Words = ()
    working_dir: Text = ""
    user: Text = ""


class _RootFs(Struct, frozen=True):
    diff_ids: Annotated[tuple[Digest, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


class _Config(Struct, frozen=True):
    rootfs: _RootFs
    config: _Process = _Process()
    architecture: Text = ""


class ArchivedImage(Struct, frozen=True, rename="pascal"):
    """One entry of Docker's `manifest.json`: paths in the archive, and names."""

    config: Text = ""
    tags: _Words = field(name="RepoTags", default=())
    layers: Annotated[tuple[Text, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


def _form(kind: Any, what: str) -> DocumentFormat[Any]:
    return DocumentFormat(type=kind, what=what, size_max=DOCUMENT_BYTES_MAX, is_foreign=True)


_MANIFEST: DocumentFormat[_Manifest] = _form(_Manifest, "the manifest of an image")
_CONFIG: DocumentFormat[_Config] = _form(_Config, "the configuration of an image")
_ARCHIVE: DocumentFormat[list[ArchivedImage]] = _form(
    Annotated[list[ArchivedImage], Meta(max_length=ENTRY_COUNT_MAX)], "a list of images"
)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Raises: CorruptError, UnknownFormatError."""
    manifest = parse_second_schema(_MANIFEST, data, where)
    layers = tuple(layer.checked(where) for layer in manifest.layers)
    return Manifest(manifest.config.checked(where), layers)


def parse_config(data: bytes, where: str) -> ImageConfig:
    """Raises: CorruptError; InvalidInputError where it configures no container image."""
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
    """Raises: CorruptError."""
    return _ARCHIVE.decode(data, where)
