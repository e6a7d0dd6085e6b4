"""Sources of timelines: a folder, the store, or several of these merged.

A `TimelineFolder` belongs to one node or is shared by nodes. In the store (`StoredTimelines`) an
object has the timeline of one node, or those that one node has gathered of others
(`bootseer.timeline.stored`); no other module reads these objects. Anybody with write access to the
store may have put an object there, so reads are bounded and unknown names are skipped.
Thread-safe, except for `MergedSources`.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol

import zstandard
from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import BootseerError, CorruptError, NotFoundError, from_oserror
from bootseer.report.decoding import decode, decode_events
from bootseer.settings.values import is_name
from bootseer.store import Store
from bootseer.timeline.otlp import Stage
from bootseer.timeline.stored import (
    FOLDER,
    GATHERED_SUFFIX,
    OBJECT_BYTES_MAX,
    decode_gathered,
    gathered_name,
    is_start,
    timeline_name,
)

_log = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024 * 1024
"""Largest timeline that is read. Bootseer writes a few lines per stage, far less than this."""
TOGETHER_BYTES_MAX = 8 * 1024**3
"""Most bytes read of one start. 10,000 nodes of 8 ranks with 50 stages each need half of it."""
_SUFFIX = ".jsonl"
# Reading from a store is waiting: more threads than processors shorten it.
_READERS = 16


class TimelineFile(Struct, frozen=True):
    """Timeline in a folder or in the store."""

    name: str
    """File name without suffix, `TIME-PID-NODE-RANK`; of gathered timelines `TIME-PID-NODE.tar`."""
    content: "Path | TimelineObject | bytes"
    """Place of the lines, or an object that was fetched, or lines that were made (`is_packed`)."""
    modified_ns: int = 0
    size_bytes: int = 0
    """Size in the folder or store, where it may be compressed."""
    is_packed: bool = False
    """Whether `content` is the bytes of an object."""
    gathered: bytes = b""
    """Object with lines of the same timeline that another node has gathered."""

    @property
    def is_gathered(self) -> bool:
        """Whether the object holds the timelines of several nodes."""
        return self.name.endswith(GATHERED_SUFFIX)

    @property
    def is_remote(self) -> bool:
        """Whether a read waits for a network, so that several threads should read at once."""
        return isinstance(self.content, TimelineObject)

    def fetch(self) -> "TimelineFile":
        """Return the timeline with a remote object in memory; empty, with a warning, if gone."""
        if not isinstance(self.content, TimelineObject):
            return self
        store, key = self.content
        try:
            data = store.read(key, 0, OBJECT_BYTES_MAX + 1)
        except NotFoundError as error:
            _log.warning("warning: %s/%s is left out: %s", store.url, key, error)
            return replace(self, content=b"")
        return replace(self, content=data, is_packed=True)

    def read(self) -> bytes:
        """Return the timeline's lines; empty if it is damaged or larger than `BYTES_MAX`."""
        if isinstance(self.content, TimelineObject):
            return self.fetch().read()
        if isinstance(self.content, Path):
            return _read_file(self.content)
        own = self._unpacked(self.content) if self.is_packed else self.content
        if not self.gathered:
            return own
        # Nobody knows which is newer. A stage in both counts once (`decode`), events are equal.
        lines = dict.fromkeys(
            [*own.splitlines(True), *self._unpacked(self.gathered).splitlines(True)]
        )
        return b"".join(lines)

    def _unpacked(self, data: bytes) -> bytes:
        try:
            return unpack(data)
        except CorruptError as error:
            _log.warning("warning: the timeline %s is left out: %s", self.name, error)
            return b""

    def members(self) -> "Iterator[TimelineFile]":
        """Yield the timelines in an object that holds several."""
        data = self.fetch().content
        assert isinstance(data, bytes)
        try:
            for name, content in decode_gathered(data):
                yield TimelineFile(name, content, self.modified_ns, len(content), is_packed=True)
        except ValueError as error:
            _log.warning("warning: timelines in %s are left out: %s", self.name, error)


class TimelineObject(NamedTuple):
    """Timeline in a store: the store and the key of its object."""

    store: Store
    key: str


def _read_file(path: Path) -> bytes:
    try:
        # The file may have been replaced by a pipe since it was listed.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise from_oserror(error, f"read the timeline {path}") from error
    return data if len(data) <= BYTES_MAX else b""


class StartFiles(Struct, frozen=True):
    """The timelines of one start of a job."""

    attempt: int
    submission: str
    """Empty if unknown; later starts of the same attempt then share the folder."""
    files: tuple[TimelineFile, ...]

    @property
    def name(self) -> str:
        """Name of the start, SUBMISSION:ATTEMPT, as `--compare` takes it."""
        return f"{self.submission}:{self.attempt}"

    @property
    def began(self) -> str:
        """Begin of the newest file in UTC, such as `20261123T000000Z`."""
        return max(map(_creation, self.files))[0]

    @property
    def modified_ns(self) -> int:
        """Time of the last write, in ns since 1970."""
        return max(file.modified_ns for file in self.files)

    @property
    def are_local(self) -> bool:
        """Whether no file is of a store: with a store's client this process is not forked."""
        return not any(file.is_remote or file.is_packed for file in self.files)

    def opened(self) -> "StartFiles":
        """Return the start with the gathered timelines as files of their own, in memory.

        What a folder has is read from there.
        """
        if not any(file.is_gathered for file in self.files):
            return self
        found = {file.name: file for file in self.files if not file.is_gathered}
        with ThreadPoolExecutor(_READERS) as pool:
            objects = list(
                pool.map(TimelineFile.fetch, (one for one in self.files if one.is_gathered))
            )
        for one in objects:
            for file in one.members():
                known = found.setdefault(file.name, file)
                if known is not file and not isinstance(known.content, Path):
                    assert isinstance(file.content, bytes)
                    found[file.name] = replace(known, gathered=file.content)
        return replace(self, files=tuple(found.values()))

    def bounded(self) -> "StartFiles":
        """Return the start without files beyond the size limits; log a warning if any is left out.

        Smaller files are kept first.
        """
        opened = self.opened()
        if opened is not self:
            return opened.bounded()
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
        """Split the start into parts of `node_count` nodes each."""
        nodes = list(self._by_node())
        return [
            replace(self, files=tuple(itertools.chain(*nodes[first : first + node_count])))
            for first in range(0, len(nodes), node_count)
        ]

    def timelines(self) -> Iterator[list[bytes]]:
        """Yield the timelines of one node after the other: the lines of each of its ranks."""
        nodes = self._by_node()
        contents = _contents([file for files in nodes for file in files])
        for files in nodes:
            yield [next(contents) for _ in files]

    def nodes(self) -> Iterator[list[Stage]]:
        """Yield the stages of one node after the other."""
        for timelines in self.timelines():
            yield [stage for data in timelines for stage in decode(data)]

    def _by_node(self) -> Collection[list[TimelineFile]]:
        """Return the files of each node, the newest of each rank only.

        Without a submission, a second file of a rank marks the begin of another start, and the
        files before it are dropped.
        """
        chosen: dict[tuple[str, str], TimelineFile] = {}
        for file in sorted(self.opened().files, key=_creation):
            writer = node_and_rank(file)
            if writer in chosen and not self.submission:
                chosen.clear()
            chosen[writer] = file
        by_node: dict[str, list[TimelineFile]] = {}
        for (node, _), file in chosen.items():
            by_node.setdefault(node, []).append(file)
        return by_node.values()

    def fetched(self) -> "StartFiles":
        """Return the start with its remote files in memory, so that any process can read them."""
        with ThreadPoolExecutor(_READERS) as pool:
            return replace(self, files=tuple(pool.map(TimelineFile.fetch, self.files)))

    def stages(self) -> list[Stage]:
        """Return the stages of all nodes."""
        return [stage for node in self.nodes() for stage in node]

    def events(self, event: str) -> list[str]:
        """Return the bodies of all events of this name."""
        return [
            body for data in _contents(self.opened().files) for body in decode_events(data, event)
        ]


class Source(Protocol):
    """A folder or store that holds timelines."""

    @property
    def where(self) -> str:
        """Path or URL for messages."""
        ...

    def starts(self, job: str) -> Iterable[StartFiles]:
        """Return the starts of a job, in any order."""
        ...


class TimelineFolder(Struct, frozen=True):
    """Timelines below a `timeline_dir`."""

    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    def starts(self, job: str) -> Iterator[StartFiles]:
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


class MergedSources:
    """Several sources as one. Not thread-safe.

    A timeline in two sources is read from the first. A source that fails after another one had
    results is left out from then on, with a warning.
    """

    def __init__(self, *sources: Source) -> None:
        self.sources = list(sources)

    @property
    def where(self) -> str:
        return " or ".join(source.where for source in self.sources)

    def starts(self, job: str) -> Iterator[StartFiles]:
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
    """Return the starts of a job, the newest first."""
    if not is_name(job):
        return []  # for example a path, which is not a valid job name
    return sorted(source.starts(job), key=_newest, reverse=True)


def _newest(start: StartFiles) -> tuple[tuple[str, int], int, str]:
    return max(map(_creation, start.files)), start.attempt, start.submission


def find_start(
    source: Source, job: str, attempt: int | None = None, submission: str | None = None
) -> StartFiles:
    """Return the newest start of `job` with this attempt and submission; None matches any.

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
    """Return the stages of the start that `find_start` finds.

    Raises: NotFoundError; BootseerError.
    """
    return find_start(source, job, attempt, submission).stages()


def _timelines(folder: Path) -> tuple[TimelineFile, ...]:
    found = [
        (Path(entry), entry.stat())
        for entry in os.scandir(folder)
        if entry.name.endswith(_SUFFIX) and entry.is_file()
    ]
    return tuple(
        TimelineFile(path.stem, path, status.st_mtime_ns, status.st_size) for path, status in found
    )


def _contents(files: Sequence[TimelineFile]) -> Iterator[bytes]:
    """Yield the content of each file, in order; read remote ones ahead with `_READERS` threads."""
    if not any(file.is_remote for file in files):
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


def _creation(file: TimelineFile) -> tuple[str, int]:
    return file.name.partition("-")[0], file.modified_ns


def node_and_rank(file: TimelineFile) -> tuple[str, str]:
    """Return node and rank of a timeline, from its name `TIME-PID-NODE-RANK`."""
    node, _, rank = file.name.split("-", 2)[-1].rpartition("-")
    return node, rank


STARTS_MAX = 1000
"""Most starts listed for a job; `gc` leaves far fewer."""
_LEVEL = 9
_WINDOW_BYTES_MAX = 8 * 1024 * 1024


def pack(data: bytes) -> bytes:
    """Compress lines to an object.

    Raises: CorruptError if the lines or the object are too large.
    """
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    if len(data) > BYTES_MAX or len(packed) > OBJECT_BYTES_MAX:
        raise CorruptError(f"{len(data)} bytes are too many for a timeline")
    return packed


def unpack(packed: bytes) -> bytes:
    """Return the lines in an object.

    Raises: CorruptError if the object is damaged, not zstd, or too large.
    """
    if len(packed) > OBJECT_BYTES_MAX:
        raise CorruptError("the object is too large for a timeline")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(BytesIO(packed)) as stream:
            data = stream.read(BYTES_MAX + 1)
        # The reader does not notice that a frame was cut off.
        declared_bytes = zstandard.frame_content_size(packed)
    except zstandard.ZstdError as error:
        raise CorruptError(f"the object is not a timeline: {error}") from error
    if len(data) > BYTES_MAX:
        raise CorruptError("the object holds more than a timeline may")
    if declared_bytes < 0:
        raise CorruptError("the object does not state how many bytes it holds")
    if len(data) != declared_bytes:
        raise CorruptError(f"the object is cut off: it has {len(data)} of {declared_bytes} bytes")
    return data


class StoredTimelines(Struct, frozen=True):
    """Timelines that nodes have published to a store."""

    store: Store

    @property
    def where(self) -> str:
        return self.store.url

    def starts(self, job: str) -> Sequence[StartFiles]:
        found: dict[str, list[TimelineFile]] = {}
        for info in self.store.list(f"{FOLDER}{job}/"):
            _, _, start, *rest = info.path.split("/")
            if len(rest) != 1 or not is_start(start):
                continue
            name = timeline_name(rest[0])
            if name is None and gathered_name(rest[0]) is not None:
                name = rest[0]
            if name is None:
                continue
            if info.size_bytes <= OBJECT_BYTES_MAX and (start in found or len(found) < STARTS_MAX):
                place = TimelineObject(self.store, info.path)
                file = TimelineFile(name, place, info.modified_ns, info.size_bytes)
                found.setdefault(start, []).append(file)
        starts = []
        for name, files in found.items():
            submission, _, attempt = name.rpartition("-")
            starts.append(StartFiles(int(attempt), submission, tuple(files)))
        return starts
