"""Where the timelines of starts are: a folder, the store, or several of these at once.

A `Folder` is a node's own or one that nodes share. In the store (`Stored`) there is one object per
node and start, `starts/JOB/SUBMISSION-ATTEMPT/NAME.jsonl.zst` (docs/format/timeline.md); this
module alone reads and names them. Anybody who may write to the store writes these: what is read is
bounded, and other names are passed over. Any thread, but for `Merged`.
"""

import itertools
import logging
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Protocol

import zstandard
from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.report.decoding import decode, decode_events
from bootseer.settings.values import is_name
from bootseer.store import Store
from bootseer.timeline.otlp import Stage

_log = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024 * 1024
"""A timeline has a few lines per stage; a larger one is not one of ours."""
TOGETHER_BYTES_MAX = 8 * 1024**3
"""Of one start: ten thousand nodes of eight ranks, each with fifty stages, have half of that."""
_SUFFIX = ".jsonl"
# A store is waited for, not worked for.
_READERS = 16


class TimelineFile(Protocol):
    """One timeline, where it lies."""

    @property
    def name(self) -> str:
        """`TIME-PID-NODE-RANK`."""
        ...

    @property
    def modified_ns(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """As it lies there."""
        ...

    @property
    def is_far(self) -> bool:
        """Whether several are read at once, by threads, since each is waited for."""
        ...

    def read(self) -> bytes:
        """Its lines; nothing where it is too large to be one of ours. Raises: BootseerError."""
        ...


class StartFiles(Struct, frozen=True):
    """The timelines of one start of a job."""

    attempt: int
    submission: str
    """Empty where nothing tells it; then later starts of one attempt are in the same folder."""
    files: tuple[TimelineFile, ...]

    @property
    def name(self) -> str:
        """As `--compare` takes it."""
        return f"{self.submission}:{self.attempt}"

    @property
    def began(self) -> str:
        """UTC, as `20261123T000000Z`, of the newest file."""
        return max(map(_when, self.files))[0]

    @property
    def modified_ns(self) -> int:
        """When the last line was written."""
        return max(file.modified_ns for file in self.files)

    @property
    def are_here(self) -> bool:
        """Whether any process can read them: not through a connection that this one has."""
        return all(isinstance(file, _File) for file in self.files)

    def bounded(self) -> "StartFiles":
        """The same without what is too large to be read; a warning says how much that is."""
        by_size = sorted(self.files, key=lambda file: file.size_bytes)
        sums = itertools.accumulate(file.size_bytes for file in by_size)
        kept = {
            id(file)
            for file, together in zip(by_size, sums, strict=True)
            if file.size_bytes <= BYTES_MAX and together <= TOGETHER_BYTES_MAX
        }
        if len(kept) == len(self.files):
            return self
        left_out = sum(file.size_bytes for file in by_size[len(kept) :])
        _log.warning(
            "warning: %d of %d timelines are left out, %.1f GB: of a start those of up to %d MiB "
            "are read, the smaller ones first, and %d GiB together",
            len(self.files) - len(kept),
            len(self.files),
            left_out / 1e9,
            BYTES_MAX >> 20,
            TOGETHER_BYTES_MAX >> 30,
        )
        return replace(self, files=tuple(file for file in self.files if id(file) in kept))

    def parts(self, node_count: int) -> "list[StartFiles]":
        """The same start in parts of so many nodes."""
        nodes = list(self._by_node())
        return [
            replace(self, files=tuple(itertools.chain(*nodes[first : first + node_count])))
            for first in range(0, len(nodes), node_count)
        ]

    def nodes(self) -> Iterator[list[Stage]]:
        """The stages of each node, one node at a time. Raises: BootseerError."""
        nodes = self._by_node()
        contents = _contents([file for files in nodes for file in files])
        for files in nodes:
            yield [stage for _ in files for stage in decode(next(contents))]

    def _by_node(self) -> Collection[list[TimelineFile]]:
        """A later file of a node and rank replaces the earlier one; where no submission tells
        starts apart, it begins another start."""
        chosen: dict[tuple[str, str], TimelineFile] = {}
        for file in sorted(self.files, key=_when):
            place = place_of(file)
            if place in chosen and not self.submission:
                chosen.clear()
            chosen[place] = file
        by_node: dict[str, list[TimelineFile]] = {}
        for (node, _), file in chosen.items():
            by_node.setdefault(node, []).append(file)
        return by_node.values()

    def stages(self) -> list[Stage]:
        """The stages of all nodes. Raises: BootseerError."""
        return [stage for node in self.nodes() for stage in node]

    def events(self, event: str) -> list[str]:
        """The bodies of the events of this name. Raises: BootseerError."""
        return [body for data in _contents(self.files) for body in decode_events(data, event)]


class Source(Protocol):
    """Where timelines are."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    def starts(self, job: str) -> Iterable[StartFiles]:
        """The starts of a job, in any order. Raises: BootseerError."""
        ...


class _File(Struct, frozen=True):
    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_far(self) -> bool:
        return False

    def read(self) -> bytes:
        try:
            # Whoever writes to the folder may have put a pipe there since it was listed.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(BYTES_MAX + 1)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise from_oserror(error, f"read the timeline {self.path}") from error
        return data if len(data) <= BYTES_MAX else b""


class Folder(Struct, frozen=True):
    """A `timeline_dir`."""

    path: Path

    @property
    def where(self) -> str:
        """For messages."""
        return str(self.path)

    def starts(self, job: str) -> Iterator[StartFiles]:
        """Raises: PermissionDeniedError."""
        folder = self.path / job
        try:
            for attempt in folder.iterdir() if folder.is_dir() else ():
                if not attempt.name.isdecimal():
                    continue
                number = int(attempt.name)
                below = [entry for entry in os.scandir(attempt) if entry.is_dir()]
                for name, path in (("", attempt), *((one.name, Path(one)) for one in below)):
                    if files := _timelines(path):
                        yield StartFiles(number, name, files)
        except OSError as error:
            raise from_oserror(error, f"list the timelines in {folder}") from error


class Merged:
    """Several sources. A timeline that two of them have is read from the first. One that fails is
    left out, with a warning, where another one has something. For one thread."""

    def __init__(self, *sources: Source) -> None:
        self.sources = list(sources)

    @property
    def where(self) -> str:
        """For messages."""
        return " or ".join(source.where for source in self.sources)

    def starts(self, job: str) -> Iterator[StartFiles]:
        """Raises: BootseerError."""
        found: dict[tuple[int, str], dict[str, TimelineFile]] = {}
        for source in tuple(self.sources):
            try:
                starts = list(source.starts(job))
            except BootseerError as error:
                if not found:
                    raise
                _log.warning("warning: timelines in %s are left out: %s", source.where, error)
                self.sources.remove(source)
                continue
            for start in starts:
                known = found.setdefault((start.attempt, start.submission), {})
                for file in start.files:
                    known.setdefault(file.name, file)
        for (attempt, submission), files in found.items():
            yield StartFiles(attempt, submission, tuple(files.values()))


def list_starts(source: Source, job: str) -> list[StartFiles]:
    """The starts of a job, the newest first. Raises: BootseerError."""
    if not is_name(job):
        return []  # a path, for example: no job is called so
    return sorted(source.starts(job), key=_newest, reverse=True)


def _newest(start: StartFiles) -> tuple[tuple[str, int], int, str]:
    return max(map(_when, start.files)), start.attempt, start.submission


def find_start(
    source: Source, job: str, attempt: int | None = None, submission: str | None = None
) -> StartFiles:
    """The newest start of `job`, or the newest one that has this attempt and this submission.

    Raises: NotFoundError; BootseerError.
    """
    for start in list_starts(source, job):
        if attempt in (None, start.attempt) and submission in (None, start.submission):
            return start
    which = [f"attempt {attempt} of"] if attempt is not None else []
    which += [f"submission {submission!r} of"] if submission is not None else []
    raise NotFoundError(
        f"no timeline of {' '.join([*which, f'job {job!r}'])} in {source.where}; start it with "
        f"`bootseer --job {job} run`"
    )


def read_start(
    source: Source, job: str, attempt: int | None = None, submission: str | None = None
) -> list[Stage]:
    """The stages of the start that `find_start` finds. Raises: as it does."""
    return find_start(source, job, attempt, submission).stages()


def _timelines(folder: Path) -> tuple[TimelineFile, ...]:
    found = [
        (Path(entry), entry.stat())
        for entry in os.scandir(folder)
        if entry.name.endswith(_SUFFIX) and entry.is_file()
    ]
    return tuple(_File(path, status.st_mtime_ns, status.st_size) for path, status in found)


def _contents(files: Sequence[TimelineFile]) -> Iterator[bytes]:
    """What is in each, in order; a few that are far away are read ahead. Raises: BootseerError."""
    if not any(file.is_far for file in files):
        yield from (file.read() for file in files)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        ahead: deque[Future[bytes]] = deque()
        for file in files:
            ahead.append(pool.submit(file.read))
            if len(ahead) == _READERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _when(file: TimelineFile) -> tuple[str, int]:
    """Sorts timelines: their names begin with the second of their start."""
    return file.name.partition("-")[0], file.modified_ns


def place_of(file: TimelineFile) -> tuple[str, str]:
    """Node and rank, from `TIME-PID-NODE-RANK`."""
    node, _, rank = file.name.split("-", 2)[-1].rpartition("-")
    return node, rank


FOLDER = "starts/"
OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""Of an object as it is stored: a node's timelines of `BYTES_MAX` become a tenth of that."""
STARTS_MAX = 1000
"""Of a job; `store gc` leaves far fewer."""
_STORED_SUFFIX = ".jsonl.zst"
_LEVEL = 9
_WINDOW_BYTES_MAX = 8 * 1024 * 1024
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_START = re.compile(rf"({_WORD}|)-([0-9]{{1,9}})")
_RANK = r"[0-9]{1,9}(?:\.[0-9a-z]{1,16})?"
_NAME = re.compile(rf"([0-9]{{8}}T[0-9]{{6}}Z-[0-9]{{1,10}}-{_WORD}-{_RANK})\.jsonl\.zst")


def key_of(job: str, submission: str, attempt: int, name: str) -> str:
    """Where the timeline of a node lies. `name`: of its first file, `TIME-PID-NODE-RANK`."""
    return f"{FOLDER}{job}/{submission}-{attempt}/{name}{_STORED_SUFFIX}"


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
        return self.key.rpartition("/")[2].removesuffix(_STORED_SUFFIX)

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
