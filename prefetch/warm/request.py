"""What `bootseer warm` was asked for, and its way to the process in the background.

Pure but for `warm_request`, which looks at the directory, and `planned`, which looks at the memory
that is left.
"""

import os
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError, PermissionDeniedError
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.warm.plan import Plan, plan
from bootseer.prefetch.warm.reader import DEFAULT_THREAD_COUNT
from bootseer.prefetch.warm.record import WarmRecord, identity_of
from bootseer.settings.config import Settings

WINDOW_S = 120.0
"""A record ends by then: a start is over, and training reads other things."""

READ_DEADLINE_S = 600.0
"""So does a read-ahead: what has not come by then, the command has read by itself."""
_SHARE = 0.5
_GROUPS = Path("/sys/fs/cgroup")


class WarmRequest(Struct, frozen=True):
    """One directory and workload, and how to go about them."""

    directory: str
    """Its real path."""
    identity: str
    workload: str
    store_url: str
    run_dir: str
    deadline_s: float
    always_record: bool = False
    """Record also where there is a record; the union is kept."""
    method: str = "auto"
    window_s: float = WINDOW_S
    memory_bytes: int | None = None
    """What may be read ahead; None: as `budget_bytes` says."""
    thread_count: int = DEFAULT_THREAD_COUNT
    read_deadline_s: float = READ_DEADLINE_S
    process: ProcessId | None = None
    """The command's process. When it ends, so does all of this."""
    ready_name: str = ""
    """The name of the socket on which `bootseer.ready()` of the command is heard."""


def warm_request(settings: Settings, directory: Path, name: str | None) -> WarmRequest:
    """The request for a directory that is there.

    Raises: NotFoundError, InvalidInputError, PermissionDeniedError.
    """
    try:
        real = os.path.realpath(directory, strict=True)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot look at {directory}: {error.strerror}") from error
    except OSError as error:
        raise NotFoundError(f"cannot warm {directory}: {error.strerror}") from error
    if not os.path.isdir(real):
        raise InvalidInputError(f"cannot warm {directory}: it is not a directory")
    return WarmRequest(
        directory=real,
        identity=identity_of(real, name),
        workload=settings.workload,
        store_url=settings.store_url,
        run_dir=str(settings.run_dir),
        deadline_s=settings.deadline_s,
    )


def planned(request: WarmRequest, record: WarmRecord) -> Plan:
    """What of a record is to be read ahead on this node now."""
    return plan(record, budget_bytes() if request.memory_bytes is None else request.memory_bytes)


def shortage(request: WarmRequest, work: Plan) -> str:
    """A sentence for people where memory does not hold all of the record, else "". Pure."""
    if not work.left_out_bytes:
        return ""
    return (
        f"the memory takes {work.planned_bytes >> 20} MiB of what {request.directory} has on "
        f"record, {work.left_out_bytes >> 20} MiB are not read ahead; see --memory"
    )


def budget_bytes(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """What a read-ahead may fill of the page cache: half of the memory available to this process,
    on this machine and in its control group. More would push out what was read ahead before, and
    the job's own pages."""
    limits = [_available_bytes(meminfo), *_group_limits(groups)]
    return int(min(limits) * _SHARE)


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _group_limits(groups: Path) -> list[int]:
    """What each control group (version 2) around this process has left, page cache counted as
    free: it is what gives way."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    found = []
    folder = groups / own.lstrip("/")
    while folder.is_relative_to(groups):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                cache = int(statistics.get("inactive_file", 0))
                found.append(max(int(limit) - used + cache, 0))
        except (OSError, ValueError):
            pass  # the root group has no limit, and an older system has no such group
        folder = folder.parent
    return found
