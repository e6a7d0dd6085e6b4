"""Timelines in the store: one object per node and start.

Alone owns `starts/JOB/SUBMISSION-ATTEMPT/NAME.jsonl.zst` (docs/format/timeline.md). Anybody
who may write to the store writes these: what is read is bounded, and other names are passed over.
Functions and frozen objects only; any thread.
"""

import logging
import re
from collections.abc import Sequence
from io import BytesIO

import zstandard
from msgspec import Struct

from bootseer.errors import CorruptError, NotFoundError
from bootseer.profile.files import BYTES_MAX, StartFiles
from bootseer.store import Store

_log = logging.getLogger(__name__)

FOLDER = "starts/"
OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""Of an object as it is stored: a node's timelines of `BYTES_MAX` become a tenth of that."""
STARTS_MAX = 1000
"""Of a job; `store gc` leaves far fewer."""
_SUFFIX = ".jsonl.zst"
_LEVEL = 9
_WINDOW_BYTES_MAX = 8 * 1024 * 1024
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_START = re.compile(rf"({_WORD}|)-([0-9]{{1,9}})")
_RANK = r"[0-9]{1,9}(?:\.[0-9a-z]{1,16})?"
_NAME = re.compile(rf"([0-9]{{8}}T[0-9]{{6}}Z-[0-9]{{1,10}}-{_WORD}-{_RANK})\.jsonl\.zst")


def key_of(job: str, submission: str, attempt: int, name: str) -> str:
    """Where the timeline of a node lies. `name`: of its first file, `TIME-PID-NODE-RANK`."""
    return f"{FOLDER}{job}/{submission}-{attempt}/{name}{_SUFFIX}"


def start_of(key: str) -> tuple[str, str] | None:
    """Job and start that the object at a key belongs to; None where it is not in a start's
    folder."""
    parts = key.split("/")
    return (parts[1], parts[2]) if len(parts) == 4 and key.startswith(FOLDER) else None


def pack(data: bytes) -> bytes:
    """The object that holds these lines. Raises: CorruptError where it would be too large."""
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    if len(data) > BYTES_MAX or len(packed) > OBJECT_BYTES_MAX:
        raise CorruptError(f"{len(data)} bytes are too many for the timeline of a start")
    return packed


def unpack(packed: bytes) -> bytes:
    """The lines in an object. Raises: CorruptError where it is none, or too large for one."""
    if len(packed) > OBJECT_BYTES_MAX:
        raise CorruptError("it is too large for the timeline of a start")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(BytesIO(packed)) as stream:
            data = stream.read(BYTES_MAX + 1)
        # The reader takes a frame that is cut off for one that ends there.
        declared_bytes = zstandard.frame_content_size(packed)
    except zstandard.ZstdError as error:
        raise CorruptError(f"it is no timeline: {error}") from error
    if len(data) > BYTES_MAX:
        raise CorruptError("it holds more than the timeline of a start")
    if declared_bytes >= 0 and len(data) != declared_bytes:
        raise CorruptError(f"it is cut off: {len(data)} of {declared_bytes} bytes are there")
    return data


class _Object(Struct, frozen=True):
    store: Store
    key: str
    modified_ns: int
    size_bytes: int

    @property
    def is_far(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2].removesuffix(_SUFFIX)

    def read(self) -> bytes:
        """Nothing of an object that is gone, or is none of ours: others are worth reading."""
        try:
            return unpack(self.store.read(self.key, 0, OBJECT_BYTES_MAX + 1))
        except (NotFoundError, CorruptError) as error:
            _log.warning("warning: %s/%s is left out: %s", self.store.url, self.key, error)
            return b""


class Stored(Struct, frozen=True):
    """The timelines that nodes have put into a store."""

    store: Store

    @property
    def where(self) -> str:
        """For messages."""
        return self.store.url

    def starts(self, job: str) -> Sequence[StartFiles]:
        """Raises: UnavailableError, DeadlineError, PermissionDeniedError."""
        found: dict[str, list[_Object]] = {}
        for info in self.store.list(f"{FOLDER}{job}/"):
            _, _, start, *rest = info.path.split("/")
            if len(rest) != 1 or not _START.fullmatch(start) or not _NAME.fullmatch(rest[0]):
                continue
            if info.size_bytes <= OBJECT_BYTES_MAX and (start in found or len(found) < STARTS_MAX):
                one = _Object(self.store, info.path, info.modified_ns, info.size_bytes)
                found.setdefault(start, []).append(one)
        starts = []
        for name, files in found.items():
            submission, _, attempt = name.rpartition("-")
            starts.append(StartFiles(int(attempt), submission, tuple(files)))
        return starts
