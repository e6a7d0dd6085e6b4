"""The JSON documents of an image, parsed and bounded: index, manifest, configuration.

Alone owns what is read of the OCI image specification (and Docker's schema 2, which differs only
in media types) and the choice of a platform. Pure: takes bytes, returns frozen objects. Nothing
in a document is believed: every type, count and size is checked, and digests are checked by
`verified` before a document is parsed.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field

from bootseer.base.documents import Digest, Form, Text
from bootseer.errors import CorruptError, InvalidInputError, NotFoundError, UnknownFormatError
from bootseer.prefetch.index.records import ImageConfig
from bootseer.registry.documents import (
    DOCUMENT_BYTES_MAX,
    INDEX_TYPES,
    this_architecture,
    unsuitability,
)

LAYER_COUNT_MAX = 1000
"""Overlayfs stops at 500, Docker at 127."""
ENTRY_COUNT_MAX = 10_000
"""The most entries of any other list."""
LAYER_BYTES_MAX = 2**40

_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"


_Words = Annotated[tuple[Text, ...], Meta(max_length=ENTRY_COUNT_MAX)]
T = TypeVar("T")


class Descriptor(Struct, frozen=True):
    """Points to bytes by digest and size; `tag` and `architecture` as an index annotates them."""

    digest: str
    size_bytes: int
    media_type: str = ""
    tag: str = ""
    system: str = ""
    architecture: str = ""
    variant: str = ""

    @property
    def is_index(self) -> bool:
        """Whether it points to another index."""
        return self.media_type in INDEX_TYPES


class Manifest(Struct, frozen=True):
    """One image: its configuration and its layers, the lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def verified(data: bytes, expected: Descriptor, where: str) -> bytes:
    """`data` if it has the digest and size that `expected` gives. Raises: CorruptError."""
    algorithm = expected.digest.partition(":")[0]
    found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
    if found != expected.digest or expected.size_bytes != len(data):
        raise CorruptError(f"{where}: {expected.digest} has other contents ({len(data)} bytes)")
    return data


class _Annotations(Struct, frozen=True):
    tag: Text = field(name="org.opencontainers.image.ref.name", default="")


class _Platform(Struct, frozen=True):
    system: Text = field(name="os", default="")
    architecture: Text = ""
    variant: Text = ""


class _Descriptor(Struct, frozen=True):
    digest: Digest
    size: Annotated[int, Meta(ge=0, le=LAYER_BYTES_MAX)]
    media_type: Text = field(name="mediaType", default="")
    annotations: _Annotations = _Annotations()
    platform: _Platform = _Platform()

    def checked(self, where: str) -> Descriptor:
        """Raises: UnknownFormatError."""
        if self.media_type.startswith(_SCHEMA_1):
            raise UnknownFormatError(
                f"{where}: Docker's image format of 2015 (schema 1) is not read"
            )
        runs_on = self.platform
        return Descriptor(
            self.digest,
            self.size,
            self.media_type,
            self.annotations.tag,
            runs_on.system,
            runs_on.architecture,
            runs_on.variant,
        )


class _Index(Struct, frozen=True):
    manifests: Annotated[tuple[_Descriptor, ...], Meta(max_length=ENTRY_COUNT_MAX)] = ()


class _Manifest(Struct, frozen=True):
    config: _Descriptor
    layers: Annotated[tuple[_Descriptor, ...], Meta(max_length=LAYER_COUNT_MAX)] = ()


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


def _form(kind: Any, what: str) -> Form[Any]:
    return Form(type=kind, what=what, size_max=DOCUMENT_BYTES_MAX, is_foreign=True)


_INDEX: Form[_Index] = _form(_Index, "an index of images")
_MANIFEST: Form[_Manifest] = _form(_Manifest, "the manifest of an image")
_CONFIG: Form[_Config] = _form(_Config, "the configuration of an image")
_ARCHIVE: Form[list[ArchivedImage]] = _form(
    Annotated[list[ArchivedImage], Meta(max_length=ENTRY_COUNT_MAX)], "a list of images"
)


def parse_index(data: bytes, where: str) -> tuple[Descriptor, ...]:
    """The manifests of an index. Raises: CorruptError, UnknownFormatError."""
    index = _second_schema(_INDEX, data, where)
    return tuple(entry.checked(where) for entry in index.manifests)


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Raises: CorruptError, UnknownFormatError."""
    manifest = _second_schema(_MANIFEST, data, where)
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


def pick_platform(manifests: Sequence[Descriptor], where: str) -> Descriptor:
    """The one for this machine. Raises: NotFoundError, naming what there is."""
    fitting = [
        (rank, number)
        for number, m in enumerate(manifests)
        if (rank := unsuitability(m.system, m.architecture, m.variant)) is not None
    ]
    if fitting:
        return manifests[min(fitting)[1]]
    # A lone image without a platform needs no choice. BuildKit's attestations are marked
    # "unknown" and are no images.
    unmarked = [m for m in manifests if not m.architecture]
    if len(unmarked) == 1:
        return unmarked[0]
    there = sorted({f"{m.system}/{m.architecture}" for m in manifests if m.architecture})
    raise NotFoundError(
        f"{where} has no image for linux/{this_architecture()}, only for "
        f"{', '.join(there) or 'none'}"
    )


def _second_schema(form: Form[T], data: bytes, where: str) -> T:
    document = form.parse(data, where)
    if isinstance(document, dict) and document.get("schemaVersion") != 2:
        version = str(document.get("schemaVersion"))[:20]
        raise UnknownFormatError(f"{where}: schema version {version} is not read, only 2")
    return form.convert(document, where)
