"""A manifest's bytes: the JSON at `snapshots/<fingerprint>.json` (`docs/format/snapshot.md`).

Pure (no I/O). Alone owns the format and every check of it: what a store returns is hostile until
`decode` has returned.
"""

from msgspec.structs import replace

from bootseer.base.documents import Form
from bootseer.errors import CorruptError
from bootseer.snapshots.catalogue.manifest import NOTHING_OUTSIDE, Manifest, Target, is_name
from bootseer.snapshots.setup.fingerprint import fingerprint
from bootseer.snapshots.targets.paths import checked_target, is_plain, text_of

LAYERED_VERSION = 2
"""The version of a manifest with a target that takes content from earlier blobs. A release that
does not know them must not read it, since its garbage collector would delete them."""

MANIFEST_BYTES_MAX = 128 * 1024 * 1024
INDEX_BYTES_MAX = 4 << 30

FORM: Form[Manifest] = Form(
    type=Manifest,
    kind="bootseer-snapshot",
    kind_member="format",
    versions=(1, LAYERED_VERSION),
    size_max=MANIFEST_BYTES_MAX,
    checksum_member="digest",
    indent=1,
)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; the same manifest always gives the same bytes."""
    outside = manifest.outside if manifest.outside.paths else NOTHING_OUTSIDE
    stored = replace(manifest, outside=outside, is_verified=True)
    return FORM.encode(stored, LAYERED_VERSION if manifest.is_layered else None)


def decode(data: bytes, expected: str | None = None) -> Manifest:
    """The manifest in `data`, checked; `expected` is the key it was stored under.

    Raises: CorruptError, also where it is another snapshot's; UnknownFormatError for a version
    that this release does not know.
    """
    where = f"the snapshot manifest {expected}" if expected else "a snapshot manifest"
    document = FORM.parse(data, where)
    manifest = FORM.convert(document, where)
    # The identity it claims: a manifest stored under another key, or edited, is refused by name.
    if not _has_its_key(manifest) or expected not in (None, manifest.fingerprint):
        raise CorruptError(f"{where} does not match its fingerprint")
    if manifest.name and not is_name(manifest.name):
        raise CorruptError(f"{where} has an unusable name")
    if manifest.is_layered and document["version"] != LAYERED_VERSION:
        raise CorruptError(f"{where} names earlier blobs, which its version has not")
    for target in manifest.targets:
        _check_target(target, where)
    if len({target.path for target in manifest.targets}) != len(manifest.targets):
        raise CorruptError(f"{where} names one target twice")
    parts = tuple(sorted(manifest.parts))
    return replace(manifest, parts=parts, is_verified=FORM.checksum_member in document)


def _has_its_key(manifest: Manifest) -> bool:
    try:
        return fingerprint(manifest.parts) == manifest.fingerprint
    except UnicodeEncodeError:
        return False


def _check_target(target: Target, where: str) -> None:
    checked_target(target.path)
    if len({blob.digest for blob in target.blobs}) != len(target.blobs):
        raise CorruptError(f"{where} names one blob of a target twice")
    for path in target.deletions:
        if not is_plain(path.split(b"/")):
            raise CorruptError(
                f"{where} wants to delete {text_of(path)[:200]!r}, outside its target"
            )
