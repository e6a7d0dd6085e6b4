"""Records of images and layers in a store, as JSON (docs/format/image.md).

A store may be shared with untrusted people, so every value of a record is checked. Pure.
"""

import re
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.base.documents import (
    AnyDigest,
    BlobDigest,
    Count,
    Count64,
    Digest,
    DigestOrNone,
    DocumentFormat,
    PathBytes,
    Sha256,
    Text,
)
from bootseer.transfer.ranges import ChunkDigests

RECORD_BYTES_MAX = 64 * 2**20
INDEX_BYTES_MAX = 2**30
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
"""Grammar of an image's name."""

_Words = Annotated[tuple[Text, ...], Meta(max_length=10_000)]
_PATHS_OF_LAYER_MAX = 2**20
ImpliedPaths = Annotated[tuple[PathBytes, ...], Meta(max_length=_PATHS_OF_LAYER_MAX)]
LinkPaths = Annotated[tuple[tuple[PathBytes, PathBytes], ...], Meta(max_length=_PATHS_OF_LAYER_MAX)]


class ImageConfig(Struct, frozen=True):
    """Configuration of an image: its containers' process, and the digests of its layers."""

    env: _Words = ()
    entrypoint: _Words = ()
    cmd: _Words = ()
    working_dir: Text = ""
    user: Text = ""
    architecture: Text = ""
    diff_ids: _Words = ()


class LayerRecord(Struct, frozen=True):
    """Layer in the store: its blob, and its tree, in which whiteouts are still plain names."""

    digest: Digest
    """Digest of the uncompressed tar, the `diff_id`; for a directory the blob's digest."""
    blob_digest: BlobDigest
    blob_size_bytes: Count
    index_digest: Sha256
    implied: ImpliedPaths = ()
    """Paths of directories without an entry in the layer's tar."""
    links: LinkPaths = ()
    """Hard links to names of lower layers: (path, target)."""


class ImageLayer(Struct, frozen=True):
    """Layer as an image's record lists it."""

    digest: AnyDigest
    blob_digest: BlobDigest
    blob_size_bytes: Count


class ImageRecord(Struct, frozen=True):
    """Indexed image. `index_digest` names its merged tree and so determines all of its bytes."""

    reference: Annotated[str, Meta(pattern=rf"\A{REFERENCE.pattern}\Z")]
    identity: AnyDigest
    """Digest of the image's configuration (Docker's image ID), or of a directory's stream."""
    index_digest: Sha256
    index_size_bytes: Annotated[int, Meta(ge=0, le=INDEX_BYTES_MAX)]
    config: ImageConfig
    layers: Annotated[tuple[ImageLayer, ...], Meta(max_length=10_000)]
    size_bytes: Count64
    """Size of the contents of all files."""
    file_count: Count
    """Number of names in the tree."""
    created_ns: Count64
    manifest_digest: DigestOrNone = ""
    """Digest of the platform's manifest in a registry; "" for an image of another source."""
    index_chunks: ChunkDigests = ()
    """Digests of the index' chunks, which nodes pass on to each other."""


IMAGE_FORM: DocumentFormat[ImageRecord] = DocumentFormat(
    type=ImageRecord,
    what="the record of an image",
    kind="bootseer-image",
    version=1,
    size_max=RECORD_BYTES_MAX,
    checksum_member="checksum",
    indent=1,
)
LAYER_FORM: DocumentFormat[LayerRecord] = DocumentFormat(
    type=LayerRecord,
    what="the record of a layer",
    kind="bootseer-layer",
    version=1,
    size_max=RECORD_BYTES_MAX,
    checksum_member="checksum",
    indent=1,
)
