"""Finds and reads the timeline files of a start."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import NotFoundError, from_oserror
from bootseer.profile.decoding import decode, decode_events
from bootseer.timeline.otlp import Stage

# A timeline has a few lines per stage; a larger file is not one of ours.
_MAX_BYTES = 64 * 1024 * 1024
_SUFFIX = ".jsonl"


class StartFiles(Struct, frozen=True):
    """The timelines of one start of a job."""

    attempt: int
    submission: str
    """Empty where nothing tells it; then later starts of one attempt are in the same folder."""
    files: tuple[Path, ...]
    began: str
    """UTC, as `20261123T000000Z`, of the newest file."""

    @property
    def name(self) -> str:
        """As `--compare` takes it."""
        return f"{self.submission}:{self.attempt}"

    def parts(self, node_count: int) -> "list[StartFiles]":
        """The same start in parts of so many nodes."""
        nodes = list(self._by_node())
        return [
            replace(self, files=tuple(itertools.chain(*nodes[first : first + node_count])))
            for first in range(0, len(nodes), node_count)
        ]

    def nodes(self) -> Iterator[list[Stage]]:
        """The stages of each node, one node at a time. Raises: PermissionDeniedError."""
        for paths in self._by_node():
            yield [stage for path in paths for stage in decode(_bytes(path))]

    def _by_node(self) -> Iterable[list[Path]]:
        """A later file of a node and rank replaces the earlier one; where no submission tells
        starts apart, it begins another start."""
        chosen: dict[tuple[str, str], Path] = {}
        for path in sorted(self.files, key=_when):
            place = _place(path)
            if place in chosen and not self.submission:
                chosen.clear()
            chosen[place] = path
        by_node: dict[str, list[Path]] = {}
        for (node, _), path in chosen.items():
            by_node.setdefault(node, []).append(path)
        return by_node.values()

    def stages(self) -> list[Stage]:
        """The stages of all nodes. Raises: PermissionDeniedError."""
        return [stage for node in self.nodes() for stage in node]

    def events(self, event: str) -> list[str]:
        """The bodies of the events of this name. Raises: PermissionDeniedError."""
        return [body for path in self.files for body in decode_events(_bytes(path), event)]


def list_starts(directory: Path, job: str) -> list[StartFiles]:
    """The starts of a job, the newest first. Raises: PermissionDeniedError."""
    try:
        found = [
            (max(map(_when, files)), attempt, submission, tuple(files))
            for (attempt, submission), files in _files(directory / job)
            if files
        ]
    except OSError as error:
        raise from_oserror(error, f"list the timelines in {directory / job}") from error
    found.sort(reverse=True)
    return [
        StartFiles(attempt, submission, files, when[0])
        for when, attempt, submission, files in found
    ]


def find_start(
    directory: Path, job: str, attempt: int | None = None, submission: str | None = None
) -> StartFiles:
    """The newest start of `job`, or the newest one that has this attempt and this submission.

    Raises: NotFoundError; PermissionDeniedError.
    """
    for start in list_starts(directory, job):
        if attempt in (None, start.attempt) and submission in (None, start.submission):
            return start
    which = [f"attempt {attempt} of"] if attempt is not None else []
    which += [f"submission {submission!r} of"] if submission is not None else []
    raise NotFoundError(
        f"no timeline of {' '.join([*which, f'job {job!r}'])} in {directory}; start it with "
        f"`bootseer --job {job} run`"
    )


def read_start(
    directory: Path, job: str, attempt: int | None = None, submission: str | None = None
) -> list[Stage]:
    """The stages of the start that `find_start` finds. Raises: as it does."""
    return find_start(directory, job, attempt, submission).stages()


def _files(folder: Path) -> Iterator[tuple[tuple[int, str], list[Path]]]:
    """The timelines of each (attempt, submission) of a job. Raises: OSError."""
    for attempt in folder.iterdir() if folder.is_dir() else ():
        if not attempt.name.isdecimal():
            continue
        entries = list(attempt.iterdir())
        yield (int(attempt.name), ""), [path for path in entries if _is_timeline(path)]
        for entry in entries:
            if entry.is_dir():
                files = [path for path in entry.iterdir() if _is_timeline(path)]
                yield (int(attempt.name), entry.name), files


def _is_timeline(path: Path) -> bool:
    return path.suffix == _SUFFIX and path.is_file()


def _when(path: Path) -> tuple[str, int]:
    """Sorts timelines: their names begin with the second of their start."""
    return path.name.partition("-")[0], path.stat().st_mtime_ns


def _place(path: Path) -> tuple[str, str]:
    """Node and rank, from `TIME-PID-NODE-RANK.jsonl`."""
    node, _, rank = path.stem.split("-", 2)[-1].rpartition("-")
    return node, rank


def _bytes(path: Path) -> bytes:
    """The content of a timeline; nothing of a file that is too large to be one."""
    try:
        return path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
    except OSError as error:
        raise from_oserror(error, f"read the timeline {path}") from error
