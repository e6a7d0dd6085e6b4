"""Manifests and indexes: media types, digests, parsing, and the choice of a platform.

Documents are untrusted: every type, count and size is checked, and `verified` compares digests
before a document is parsed. Pure but for reading the machine's architecture.
"""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field

from bootseer.base.documents import Digest, DocumentFormat, Text, parse
from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCUMENT_BYTES_MAX = 8 * 2**20
"""Registries refuse manifests above 4 MiB; a configuration with a long history may be larger."""
INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json")
ENTRY_COUNT_MAX = 10_000
"""The most entries of a list in a document."""
BLOB_BYTES_MAX = 2**40
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"
_NESTING_MAX = 4
# platform.machine() -> GOARCH, where they differ.
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}
# Variants of an architecture in order of preference; other variants come last. Any amd64 machine
# runs an image without a variant, and v8 is the only variant of arm64.
_VARIANTS = {"amd64": ("", "v1"), "arm64": ("v8", ""), "arm": ("v7", "v6", "v5", "")}

T = TypeVar("T")


class Descriptor(Struct, frozen=True):
    """Reference to stored bytes by digest and size, with the annotations of an index."""

    digest: str
    size_bytes: int
    media_type: str = ""
    tag: str = ""
    system: str = ""
    architecture: str = ""
    variant: str = ""


class Document(Struct, frozen=True):
    """A manifest or an index of manifests, as it is stored."""

    digest: str
    media_type: str
    data: bytes


def verified(data: bytes, expected: Descriptor, where: str) -> bytes:
    """Return `data` if it has the digest and size of `expected`. Raises: CorruptError."""
    found = digest_of(data, expected.digest.partition(":")[0])
    if found != expected.digest or expected.size_bytes != len(data):
        raise CorruptError(f"{where}: {expected.digest} has other contents ({len(data)} bytes)")
    return data


def digest_of(data: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of `data`. Raises: CorruptError for an algorithm that OCI does not have."""
    if algorithm not in ("sha256", "sha512"):
        raise CorruptError(f"{algorithm[:20]!r} is no digest algorithm")
    return f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"


def fallback_tag(digest: str) -> str:
    """Return the tag of the list of referrers in a registry without the referrers API."""
    return digest.replace(":", "-", 1)


def parse_object(data: bytes, where: str) -> Mapping[str, Any]:
    """Return a JSON object that a registry sent. Raises: CorruptError."""
    try:
        document = parse(data, where, DOCUMENT_BYTES_MAX, is_foreign=True)
    except CorruptError:
        document = None
    if not isinstance(document, dict):
        raise CorruptError(f"{where} sent something that is not a JSON object")
    return document


def this_architecture() -> str:
    """Return this machine's architecture by its name in images (GOARCH)."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _platform_rank(system: str, architecture: str, variant: str) -> int | None:
    """Return a platform's rank for this machine, 0 for the best; None if it does not run."""
    wanted = this_architecture()
    if architecture != wanted or system not in ("linux", ""):
        return None
    preferred = _VARIANTS.get(wanted, ())
    return preferred.index(variant) if variant in preferred else len(preferred)


class _Annotations(Struct, frozen=True):
    tag: Text = field(name="org.opencontainers.image.ref.name", default="")


class _Platform(Struct, frozen=True):
    system: Text = field(name="os", default="")
    architecture: Text = ""
    variant: Text = ""


class DescriptorForm(Struct, frozen=True):
    """JSON form of a descriptor."""

    digest: Digest
    size: Annotated[int, Meta(ge=0, le=BLOB_BYTES_MAX)]
    media_type: Text = field(name="mediaType", default="")
    annotations: _Annotations = _Annotations()
    platform: _Platform = _Platform()

    def checked(self, where: str) -> Descriptor:
        """Return the `Descriptor`. Raises: UnknownFormatError."""
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
    manifests: Annotated[tuple[DescriptorForm, ...], Meta(max_length=ENTRY_COUNT_MAX)] = ()


_INDEX: DocumentFormat[_Index] = DocumentFormat(
    type=_Index, what="an index of images", size_max=DOCUMENT_BYTES_MAX, is_foreign=True
)


def parse_second_schema(form: DocumentFormat[T], data: bytes, where: str) -> T:
    """Decode a document whose schema must be 2. Raises: CorruptError, UnknownFormatError."""
    document = form.parse(data, where)
    if isinstance(document, dict) and document.get("schemaVersion") != 2:
        version = str(document.get("schemaVersion"))[:20]
        raise UnknownFormatError(f"{where}: schema version {version} is not read, only 2")
    return form.convert(document, where)


def parse_index(data: bytes, where: str) -> tuple[Descriptor, ...]:
    """Return the manifests of an index. Raises: CorruptError, UnknownFormatError."""
    index = parse_second_schema(_INDEX, data, where)
    return tuple(entry.checked(where) for entry in index.manifests)


def pick_platform(manifests: Sequence[Descriptor], where: str) -> Descriptor:
    """Return the manifest for this machine. Raises: NotFoundError with the platforms there are."""
    fitting = [
        (rank, number)
        for number, m in enumerate(manifests)
        if (rank := _platform_rank(m.system, m.architecture, m.variant)) is not None
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


def manifest_for_this_machine(
    document: Document, fetch: Callable[[Descriptor], Document], where: str
) -> Document:
    """Return the manifest for this machine: `document`, or a manifest that this index leads to.

    `fetch` returns the document of a descriptor with a verified digest. Raises: NotFoundError if
    there is none for this platform; CorruptError, UnknownFormatError; as `fetch`.
    """
    for _ in range(_NESTING_MAX):
        if document.media_type not in INDEX_TYPES:
            return document
        chosen = pick_platform(parse_index(document.data, where), where)
        document = fetch(chosen)
        if len(document.data) != chosen.size_bytes:
            raise CorruptError(
                f"{where}: {chosen.digest} has {len(document.data)} bytes, not the "
                f"{chosen.size_bytes} declared"
            )
    raise CorruptError(f"{where}: indexes are nested too deeply")
