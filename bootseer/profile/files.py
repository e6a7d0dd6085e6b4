"""Finds and reads the timeline files of a start."""

from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import NotFoundError, from_oserror
from bootseer.timeline.otlp import Stage, decode, decode_events

# A timeline has a few lines per stage; a larger file is not one of ours.
_MAX_BYTES = 64 * 1024 * 1024
_SUFFIX = ".jsonl"


def read_start(
    directory: Path, job: str, attempt: int | None = None, submission: str | None = None
) -> list[Stage]:
    """All stages of the newest start of `job`, or of the newest one that has this attempt and this
    submission.

    Several files belong to one start when they come from different nodes or ranks. A later file of
    a node and rank replaces the earlier one; where no submission tells starts apart, it begins
    another start.

    Raises: NotFoundError; PermissionDeniedError.
    """
    files, submission = _newest(directory, job, attempt, submission)
    return _one_start(files, is_told_apart=bool(submission))


def read_events(
    directory: Path, job: str, attempt: int | None, submission: str | None, event: str
) -> list[str]:
    """The bodies of the events of this name in the files that `read_start` reads.

    Raises: NotFoundError; PermissionDeniedError.
    """
    files, _ = _newest(directory, job, attempt, submission)
    return [body for path in files for body in decode_events(_bytes(path), event)]


def _newest(
    directory: Path, job: str, attempt: int | None, submission: str | None
) -> tuple[list[Path], str]:
    """The files of the newest start that is asked for, and its submission."""
    try:
        starts = {
            key: files
            for key, files in _files(directory / job)
            if files and attempt in (None, key[0]) and submission in (None, key[1])
        }
        newest = max(starts, key=lambda key: max(map(_when, starts[key])), default=None)
    except OSError as error:
        raise from_oserror(error, f"list the timelines in {directory / job}") from error
    if newest is None:
        which = [f"attempt {attempt} of"] if attempt is not None else []
        which += [f"submission {submission!r} of"] if submission is not None else []
        raise NotFoundError(
            f"no timeline of {' '.join([*which, f'job {job!r}'])} in {directory}; start it with "
            f"`bootseer --job {job} run`"
        )
    return starts[newest], newest[1]


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


def _one_start(files: list[Path], *, is_told_apart: bool) -> list[Stage]:
    read = [stages for path in files if (stages := _read(path))]
    found: dict[tuple[str, str], list[Stage]] = {}
    for stages in sorted(read, key=lambda stages: stages[0].start_ns):
        resource = stages[0].resource
        place = str(resource.get("host.name")), str(resource.get("bootseer.rank"))
        if place in found and not is_told_apart:
            found.clear()
        found[place] = stages
    return [stage for stages in found.values() for stage in stages]


def _read(path: Path) -> list[Stage]:
    return decode(_bytes(path))


def _bytes(path: Path) -> bytes:
    """The content of a timeline; nothing of a file that is too large to be one."""
    try:
        return path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
    except OSError as error:
        raise from_oserror(error, f"read the timeline {path}") from error
