"""What of a workload lies in the store: its traces, its hot set, its bundle, and the pointer to
the newest of these.

Alone owns these keys and the pointer's JSON (docs/format/bundle.md). Thread-safe: functions and
frozen values only.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import quote

from msgspec import Meta, Struct

from bootseer.base.documents import Count, Count64, Form, PathBytes, Sha256
from bootseer.errors import CorruptError, NotFoundError
from bootseer.prefetch.bundle.format import (
    HEADER_BYTES_MAX,
    HEADER_BYTES_MIN,
    Bundle,
    decode_header,
)
from bootseer.prefetch.record import hotset
from bootseer.prefetch.record import trace as trace_format
from bootseer.prefetch.record.hotset import HotSet
from bootseer.prefetch.record.scattered import SCATTERED_COUNT_MAX
from bootseer.prefetch.record.trace import Trace
from bootseer.store import Store

_TRACE_BYTES_MAX = 64 * 2**20
_HOTSET_BYTES_MAX = 256 * 2**20
_NAME_BYTES_MAX = 200
"""Names in registries may be longer than what a file system takes."""
MERGED_TRACE_COUNT = 16
"""The newest traces count: an image's use changes slowly, and merging stays a matter of seconds."""


class HotPointer(Struct, frozen=True, omit_defaults=True):
    """Names the newest bundle of an image and workload."""

    index_digest: Sha256
    bundle_digest: Sha256
    """The digest of the bundle's header, which holds the digests of all else."""
    size_bytes: Count
    header_bytes: Annotated[int, Meta(ge=HEADER_BYTES_MIN, le=HEADER_BYTES_MAX)]
    hotset_digest: Sha256
    trace_count: Count
    """How many traces it was made from."""
    created_ns: Count64
    scattered: Annotated[tuple[PathBytes, ...], Meta(max_length=SCATTERED_COUNT_MAX)] = ()
    """Files of which each start reads other bytes, so that they are not in the bundle."""


POINTER_FORM: Form[HotPointer] = Form(
    type=HotPointer,
    what="a pointer to a bundle",
    kind="bootseer-hot",
    versions=(1,),
    size_max=64 * 1024,
    indent=1,
)


def _hex(digest: str) -> str:
    return digest.partition(":")[2]


def pointer_key(index_digest: str, workload: str) -> str:
    """Returns the key of the pointer to a bundle."""
    return f"hot/{_hex(index_digest)}/{workload}.json"


def name_folder(name: str) -> str:
    """Where it says which images of a name have bundles; `name` is without tag and digest."""
    quoted = quote(name, safe="")
    if len(quoted) > _NAME_BYTES_MAX:
        quoted = hashlib.sha256(name.encode()).hexdigest()
    return f"hot/names/{quoted}/"


def name_key(name: str, workload: str) -> str:
    """Where it says that for one workload."""
    return f"{name_folder(name)}{workload}.json"


def stream_key(stream_digest: str, workload: str) -> str:
    """Returns the key of the record of images with bundles whose largest stream this is."""
    return f"hot/streams/{quote(stream_digest, safe='')}/{workload}.json"


def header_key(digest: str) -> str:
    """Returns the key of the header of a bundle; `digest` is the SHA-256 of the header."""
    return f"bundles/sha256/{_hex(digest)}/header"


def part_key(digest: str, part: int) -> str:
    """Returns the key of a part of a bundle."""
    return f"bundles/sha256/{_hex(digest)}/{part}"


def hotset_key(digest: str) -> str:
    """Returns the key of a hot set."""
    return f"hotsets/sha256/{_hex(digest)}"


def trace_prefix(index_digest: str, workload: str) -> str:
    """Returns the prefix of the keys of a workload's traces."""
    return f"traces/{_hex(index_digest)}/{workload}/"


def lease_key(index_digest: str, workload: str) -> str:
    """The key of the lease that a builder of the workload's bundle holds."""
    return f"leases/hot/{_hex(index_digest)}/{workload}"


def decode_pointer(data: bytes, index_digest: str, where: str) -> HotPointer:
    """Raises: CorruptError, UnknownFormatError."""
    pointer = POINTER_FORM.decode(data, where)
    if pointer.index_digest != index_digest:
        raise CorruptError(f"{where} points to the bundle of another image")
    return pointer


def read_pointer(store: Store, index_digest: str, workload: str) -> HotPointer | None:
    """None where the workload has no bundle yet. Raises: as `decode_pointer`, UnavailableError."""
    key = pointer_key(index_digest, workload)
    try:
        data = store.read(key, 0, POINTER_FORM.size_max + 1)
    except NotFoundError:
        return None
    return decode_pointer(data, index_digest, f"{store.url}/{key}")


def read_bundle(store: Store, pointer: HotPointer, stream_lengths: Sequence[int]) -> Bundle:
    """The header of the pointer's bundle, verified. Raises: NotFoundError, CorruptError,
    UnknownFormatError, UnavailableError."""
    header = read_header(store, pointer)
    return decode_bundle(header, pointer, stream_lengths, store.url)


def read_header(store: Store, pointer: HotPointer) -> bytes:
    """The stored header of the pointer's bundle. Raises: NotFoundError, UnavailableError."""
    return store.read(header_key(pointer.bundle_digest), 0, pointer.header_bytes)


def decode_bundle(
    header: bytes, pointer: HotPointer, stream_lengths: Sequence[int], where: str
) -> Bundle:
    """What a header says, verified against the pointer. Raises: CorruptError,
    UnknownFormatError."""
    if hashlib.sha256(header).hexdigest() != _hex(pointer.bundle_digest):
        key = header_key(pointer.bundle_digest)
        raise CorruptError(f"{where}/{key} does not match the digest in its name")
    return decode_header(header, pointer.index_digest, stream_lengths)


def read_hotset(store: Store, pointer: HotPointer) -> HotSet:
    """Return the hot set from which the pointer's bundle was made, verified.

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


def publish_trace(store: Store, trace: Trace) -> str:
    """Store a trace under a name of its content; returns its key."""
    data = trace_format.encode(trace)
    name = hashlib.sha256(data).hexdigest()[:32]
    key = trace_prefix(trace.index_digest, trace.workload) + name
    store.publish(key, data)
    return key


def trace_keys(store: Store, index_digest: str, workload: str) -> list[str]:
    """Keys of a workload's traces, the newest first, at most `MERGED_TRACE_COUNT`."""
    return _all_trace_keys(store, index_digest, workload)[:MERGED_TRACE_COUNT]


def drop_old_traces(store: Store, index_digest: str, workload: str) -> int:
    """Delete the traces that merging does not look at; returns how many.

    For the holder of the workload's lease, so that a thousand nodes that record at once do not
    leave a thousand traces for good. Raises: UnavailableError.
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
    """Raises: NotFoundError, CorruptError, UnknownFormatError."""
    data = store.read(key, 0, _TRACE_BYTES_MAX + 1)
    if hashlib.sha256(data).hexdigest()[:32] != key.rpartition("/")[2]:
        raise CorruptError(f"{store.url}/{key} does not match the digest in its name")
    trace = trace_format.decode(data)
    if not key.startswith(trace_prefix(trace.index_digest, trace.workload)):
        raise CorruptError(f"{store.url}/{key} is the trace of another image or workload")
    return trace


def workloads(store: Store, index_digest: str) -> list[str]:
    """Workloads that have traces of this image."""
    prefix = f"traces/{_hex(index_digest)}/"
    return sorted({info.path[len(prefix) :].partition("/")[0] for info in store.list(prefix)})
