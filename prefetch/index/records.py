"""The records of images and layers in a store, as JSON (docs/format/image.md).

Alone owns their codec. Pure. A store may be shared with people one does not trust, so a record is
taken apart with every value checked.
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

RECORD_BYTES_MAX = 64 * 2**20
INDEX_BYTES_MAX = 2**30
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
"""What can name an image."""

_Words = Annotated[tuple[Text, ...], Meta(max_length=10_000)]
# Of one layer.
_NOTE_MAX = 2**20
ImpliedPaths = Annotated[tuple[PathBytes, ...], Meta(max_length=_NOTE_MAX)]
LinkPaths = Annotated[tuple[tuple[PathBytes, PathBytes], ...], Meta(max_length=_NOTE_MAX)]


class ImageConfig(Struct, frozen=True):
    """How a container of the image is started, and the digests of its uncompressed layers."""

    env: _Words = ()
    entrypoint: _Words = ()
    cmd: _Words = ()
    working_dir: Text = ""
    user: Text = ""
    architecture: Text = ""
    diff_ids: _Words = ()


class LayerRecord(Struct, frozen=True):
    """A layer in the store: its blob, and its tree with whiteouts still in it."""

    digest: Digest
    """The digest of the uncompressed tar, the `diff_id`; of a directory: the blob's digest."""
    blob_digest: BlobDigest
    blob_size_bytes: Count
    index_digest: Sha256
    implied: ImpliedPaths = ()
    """Paths of directories that the layer's tar does not name."""
    links: LinkPaths = ()
    """Hard links to names of lower layers: (path, target)."""


class ImageLayer(Struct, frozen=True):
    """A layer as an image's record lists it."""

    digest: AnyDigest
    blob_digest: BlobDigest
    blob_size_bytes: Count


class ImageRecord(Struct, frozen=True):
    """An indexed image. `index_digest` names its merged tree, which pins all of its bytes."""

    reference: Annotated[str, Meta(pattern=rf"\A{REFERENCE.pattern}\Z")]
    identity: AnyDigest
    """Digest of the image's configuration, Docker's image ID; of a directory: of its stream."""
    index_digest: Sha256
    index_size_bytes: Annotated[int, Meta(ge=0, le=INDEX_BYTES_MAX)]
    config: ImageConfig
    layers: Annotated[tuple[ImageLayer, ...], Meta(max_length=10_000)]
    size_bytes: Count64
    """The size of all files' contents."""
    file_count: Count
    """Names in the tree."""
    created_ns: Count64
    manifest_digest: DigestOrNone = ""
    """The digest of the platform's manifest in a registry; empty where it came from elsewhere."""


IMAGE_FORM: DocumentFormat[ImageRecord] = DocumentFormat(
    type=ImageRecord,
    what="the record of an image",
    kind="bootseer-image",
    versions=(1,),
    size_max=RECORD_BYTES_MAX,
    checksum_member="checksum",
    indent=1,
)
LAYER_FORM: DocumentFormat[LayerRecord] = DocumentFormat(
    type=LayerRecord,
    what="the record of a layer",
    kind="bootseer-layer",
    versions=(1,),
    size_max=RECORD_BYTES_MAX,
    checksum_member="checksum",
    indent=1,
)
