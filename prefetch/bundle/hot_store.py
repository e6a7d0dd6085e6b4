"""Stored objects of a workload: traces, hot set, bundle, and the pointer to the newest bundle.

Owns the keys of these objects in the store and the pointer's JSON (docs/format/bundle.md), and the
node's own copies of pointer and header below `cache_dir/catalogue/hot`, with which a start needs no
store. A copy is verified when it is read, serves only images of the store that it came from, and is
never synced to the disk. Thread-safe: functions and frozen values only.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from msgspec import Meta, Struct

from bootseer.base.documents import (
    Count,
    Count64,
    DocumentFormat,
    PathBytes,
    ReadableStore,
    Sha256,
)
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.fanout.whole_reads import decline_whole, read_whole
from bootseer.linux.private_files import write_private_file
from bootseer.prefetch.bundle.format import (
    HEADER_BYTES_MAX,
    HEADER_BYTES_MIN,
    Bundle,
    decode_header,
)
from bootseer.prefetch.cache.node_cache import store_hex
from bootseer.prefetch.record import hotset
from bootseer.prefetch.record import trace as trace_format
from bootseer.prefetch.record.hotset import SCATTERED_COUNT_MAX, HotSet
from bootseer.prefetch.record.trace import Trace
from bootseer.settings.config import Settings
from bootseer.store import Store
from bootseer.transfer.ranges import Chunk, ChunkDigests, even_chunks

_log = logging.getLogger(__name__)

_TRACE_BYTES_MAX = 64 * 2**20
_HOTSET_BYTES_MAX = 256 * 2**20
_NAME_BYTES_MAX = 200
"""Longer names of images are hashed, since file systems limit the length of names."""
MERGED_TRACE_COUNT = 16
"""Number of traces, the newest ones, that a bundle is made of: the use of an image changes slowly,
and merging them takes seconds."""


class HotPointer(Struct, frozen=True, omit_defaults=True):
    """Pointer to the newest bundle of an image and workload."""

    index_digest: Sha256
    bundle_digest: Sha256
    """Digest of the bundle's header, which holds the digests of all frames."""
    size_bytes: Count
    header_bytes: Annotated[int, Meta(ge=HEADER_BYTES_MIN, le=HEADER_BYTES_MAX)]
    hotset_digest: Sha256
    trace_count: Count
    """Number of traces that the bundle was made from."""
    created_ns: Count64
    scattered: Annotated[tuple[PathBytes, ...], Meta(max_length=SCATTERED_COUNT_MAX)] = ()
    """Files that are not in the bundle, because each start reads different bytes of them."""
    header_chunks: ChunkDigests = ()
    """Digests of the header's chunks, which nodes pass on to each other."""


POINTER_FORM: DocumentFormat[HotPointer] = DocumentFormat(
    type=HotPointer,
    what="a pointer to a bundle",
    kind="bootseer-hot",
    version=1,
    size_max=64 * 1024,
    indent=1,
)


# ---- keys ---------------------------------------------------------------------------------------


def _hex(digest: str) -> str:
    return digest.partition(":")[2]


def pointer_key(index_digest: str, workload: str) -> str:
    """Return the key of the pointer to a bundle."""
    return f"hot/{_hex(index_digest)}/{workload}.json"


def name_folder(name: str) -> str:
    """Return the prefix of the keys of the records of similar images under an image's name.

    `name` is without tag and digest.
    """
    quoted = quote(name, safe="")
    if len(quoted) > _NAME_BYTES_MAX:
        quoted = hashlib.sha256(name.encode()).hexdigest()
    return f"hot/names/{quoted}/"


def name_key(name: str, workload: str) -> str:
    """Return the key of the record of images with bundles that share this name."""
    return f"{name_folder(name)}{workload}.json"


def stream_key(stream_digest: str, workload: str) -> str:
    """Return the key of the record of images with bundles that share this largest stream."""
    return f"hot/streams/{quote(stream_digest, safe='')}/{workload}.json"


def header_key(digest: str) -> str:
    """Return the key of the header of a bundle; `digest` is the SHA-256 of the header."""
    return f"bundles/sha256/{_hex(digest)}/header"


def part_key(digest: str, part: int) -> str:
    """Return the key of a part of a bundle."""
    return f"bundles/sha256/{_hex(digest)}/{part}"


def hotset_key(digest: str) -> str:
    """Return the key of a hot set."""
    return f"hotsets/sha256/{_hex(digest)}"


def trace_prefix(index_digest: str, workload: str) -> str:
    """Return the prefix of the keys of a workload's traces."""
    return f"traces/{_hex(index_digest)}/{workload}/"


def lease_key(index_digest: str, workload: str) -> str:
    """Return the key of the lease that a builder of the workload's bundle holds."""
    return f"leases/hot/{_hex(index_digest)}/{workload}"


# ---- the bundle and its pointer -----------------------------------------------------------------


def decode_pointer(data: bytes, index_digest: str, where: str) -> HotPointer:
    """Decode the pointer to a bundle of an image.

    Raises: CorruptError, also if it points to another image's bundle; UnknownFormatError.
    """
    pointer = POINTER_FORM.decode(data, where)
    if pointer.index_digest != index_digest:
        raise CorruptError(f"{where} points to the bundle of another image")
    return pointer


def read_pointer(store: ReadableStore, index_digest: str, workload: str) -> HotPointer | None:
    """Read the pointer to the workload's bundle. Return None if there is no bundle yet.

    Raises: CorruptError, UnknownFormatError, UnavailableError.
    """
    key = pointer_key(index_digest, workload)
    try:
        data = store.read(key, 0, POINTER_FORM.size_max + 1)
    except NotFoundError:
        return None
    return decode_pointer(data, index_digest, f"{store.url}/{key}")


def read_bundle(store: Store, pointer: HotPointer, stream_lengths: Sequence[int]) -> Bundle:
    """Read and verify the header of the pointer's bundle.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    header = read_header(store, pointer)
    return decode_bundle(header, pointer, stream_lengths, store.url)


def read_header(store: Store, pointer: HotPointer, start: Settings | None = None) -> bytes:
    """Return the stored header of the pointer's bundle.

    `start`: settings of a start whose nodes may feed each other.
    Raises: NotFoundError, UnavailableError.
    """
    if start is not None:
        data = read_whole(start, _header_chunks(pointer))
        if data is not None and hashlib.sha256(data).hexdigest() == _hex(pointer.bundle_digest):
            return data
    return store.read(header_key(pointer.bundle_digest), 0, pointer.header_bytes)


def decline_header(start: Settings, pointer: HotPointer) -> None:
    """Tell the other nodes of the start that this one has the header of the pointer's bundle."""
    decline_whole(start, _header_chunks(pointer))


def _header_chunks(pointer: HotPointer) -> tuple[Chunk, ...]:
    key = header_key(pointer.bundle_digest)
    return even_chunks(key, pointer.header_bytes, pointer.header_chunks)


def decode_bundle(
    header: bytes, pointer: HotPointer, stream_lengths: Sequence[int], where: str
) -> Bundle:
    """Decode a header after checking its digest. Raises: CorruptError, UnknownFormatError."""
    if hashlib.sha256(header).hexdigest() != _hex(pointer.bundle_digest):
        key = header_key(pointer.bundle_digest)
        raise CorruptError(f"{where}/{key} does not match the digest in its name")
    return decode_header(header, pointer.index_digest, stream_lengths)


def read_hotset(store: Store, pointer: HotPointer) -> HotSet:
    """Read and verify the hot set from which the pointer's bundle was made.

    Raises: NotFoundError, CorruptError, UnknownFormatError, UnavailableError.
    """
    key = hotset_key(pointer.hotset_digest)
    data = store.read(key, 0, _HOTSET_BYTES_MAX + 1)
    if hashlib.sha256(data).hexdigest() != _hex(pointer.hotset_digest):
        raise CorruptError(f"{store.url}/{key} does not match the digest in its name")
    hot = hotset.decode(data)
    if hot.index_digest != pointer.index_digest:
        raise CorruptError(f"{store.url}/{key} is the hot set of another image")
    return hot


# ---- traces -------------------------------------------------------------------------------------


def publish_trace(store: Store, trace: Trace) -> str:
    """Store a trace under a key made of its content. Return the key."""
    data = trace_format.encode(trace)
    name = hashlib.sha256(data).hexdigest()[:32]
    key = trace_prefix(trace.index_digest, trace.workload) + name
    store.publish(key, data)
    return key


def trace_keys(store: Store, index_digest: str, workload: str) -> list[str]:
    """Return the keys of a workload's newest `MERGED_TRACE_COUNT` traces, the newest first."""
    return _all_trace_keys(store, index_digest, workload)[:MERGED_TRACE_COUNT]


def drop_old_traces(store: Store, index_digest: str, workload: str) -> int:
    """Delete the traces that are too old to be merged. Return their number.

    The caller holds the workload's lease. Without this, a thousand nodes that record at once would
    leave a thousand traces. Raises: UnavailableError.
    """
    old = _all_trace_keys(store, index_digest, workload)[MERGED_TRACE_COUNT:]
    store.delete_many(old)
    return len(old)


def _all_trace_keys(store: Store, index_digest: str, workload: str) -> list[str]:
    infos = sorted(
        store.list(trace_prefix(index_digest, workload)),
        key=lambda info: (-info.modified_ns, info.path),
    )
    return [info.path for info in infos]


def read_trace(store: Store, key: str) -> Trace:
    """Read and verify a trace. Raises: NotFoundError, CorruptError, UnknownFormatError."""
    data = store.read(key, 0, _TRACE_BYTES_MAX + 1)
    if hashlib.sha256(data).hexdigest()[:32] != key.rpartition("/")[2]:
        raise CorruptError(f"{store.url}/{key} does not match the digest in its name")
    trace = trace_format.decode(data)
    if not key.startswith(trace_prefix(trace.index_digest, trace.workload)):
        raise CorruptError(f"{store.url}/{key} is the trace of another image or workload")
    return trace


def workloads(store: Store, index_digest: str) -> list[str]:
    """Return the workloads that have traces of an image, sorted."""
    prefix = f"traces/{_hex(index_digest)}/"
    return sorted({info.path[len(prefix) :].partition("/")[0] for info in store.list(prefix)})


# ---- copies on this node ------------------------------------------------------------------------


def keep_bundle(settings: Settings, workload: str, pointer: HotPointer, header: bytes) -> None:
    """Write copies of a bundle's pointer and header to the node. Never raises."""
    path = _copy_path(settings, pointer.index_digest, workload)
    try:
        write_private_file(path.with_suffix(".header"), header)
        write_private_file(path, POINTER_FORM.encode(pointer))
    except OSError as error:
        _log.debug("the bundle of %s is not kept: %s", workload, error)


def read_kept_bundle(
    settings: Settings, index_digest: str, workload: str, stream_lengths: Sequence[int]
) -> tuple[HotPointer, Bundle] | None:
    """Return this node's copy of a bundle, maybe an older one; None unless it is intact."""
    path = _copy_path(settings, index_digest, workload)
    try:
        data = _read_copy(path, POINTER_FORM.size_max)
        pointer = decode_pointer(data, index_digest, str(path))
        header = _read_copy(path.with_suffix(".header"), HEADER_BYTES_MAX)
        return pointer, decode_bundle(header, pointer, stream_lengths, str(path))
    except FileNotFoundError:
        return None
    except (BootseerError, OSError) as error:
        _log.debug("the kept bundle of %s is not used: %s", workload, error)
        return None


def refuse_bundle(settings: Settings, workload: str, pointer: HotPointer) -> None:
    """Mark a bundle with wrong bytes, so that this node never uses it again. Never raises."""
    path = _copy_path(settings, pointer.index_digest, workload).with_suffix(".refused")
    try:
        write_private_file(path, pointer.bundle_digest.encode("ascii"))
    except OSError as error:
        _log.warning("cannot mark the bundle of workload %s as wrong: %s", workload, error)


def is_refused(settings: Settings, workload: str, pointer: HotPointer) -> bool:
    """Return whether this node marked the bundle as wrong. Newer bundles are not affected."""
    path = _copy_path(settings, pointer.index_digest, workload).with_suffix(".refused")
    try:
        return _read_copy(path, POINTER_FORM.size_max) == pointer.bundle_digest.encode("ascii")
    except OSError:
        return False


def _copy_path(settings: Settings, index_digest: str, workload: str) -> Path:
    name = f"{_hex(index_digest)}-{store_hex(settings.store_url)}-{workload}.json"
    return settings.cache_dir / "catalogue" / "hot" / name


def _read_copy(path: Path, bytes_max: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    # `cache.limit` removes copies by the time of their last use.
    with contextlib.suppress(OSError):
        os.utime(path)
    return data
