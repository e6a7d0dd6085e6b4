"""Finds and reads the timeline files of a start."""

from pathlib import Path

from bootseer.errors import NotFoundError, from_oserror
from bootseer.timeline.otlp import Stage, decode

# A timeline has a few lines per stage; a larger file is not one of ours.
_MAX_BYTES = 64 * 1024 * 1024


def read_start(directory: Path, job: str, attempt: int | None) -> list[Stage]:
    """All stages of the newest start of `job`, or of its `attempt`'s newest start.

    Several files belong to one start when they come from different nodes or ranks; a later file
    of the same node and rank is a later start and replaces the earlier one.

    Raises: NotFoundError; PermissionDeniedError.
    """
    job_directory = directory / job
    try:
        attempts = {
            int(path.name): path
            for path in (job_directory.iterdir() if job_directory.is_dir() else ())
            if path.name.isdigit()
        }
    except OSError as error:
        raise from_oserror(error, f"list the timelines in {job_directory}") from error
    wanted = max(attempts, default=None) if attempt is None else attempt
    if wanted is None or wanted not in attempts:
        what = f"job {job!r}" if attempt is None else f"attempt {attempt} of job {job!r}"
        raise NotFoundError(
            f"no timeline of {what} in {directory}; start it with `bootseer --job {job} run`"
        )
    newest: dict[tuple[str, str], list[Stage]] = {}
    for path in sorted(attempts[wanted].glob("*.jsonl")):
        try:
            if path.stat().st_size > _MAX_BYTES:
                continue
            stages = decode(path.read_bytes())
        except OSError as error:
            raise from_oserror(error, f"read the timeline {path}") from error
        if stages:
            resource = stages[0].resource
            newest[str(resource.get("host.name")), str(resource.get("bootseer.rank"))] = stages
    return [stage for stages in newest.values() for stage in stages]
