"""Cgroups for tests: frozen, killed as a whole, or with a limit of memory.

`docker pause` and batch systems freeze the cgroup of a process; a container's end kills its cgroup.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from testbed.needs import MissingError
from testbed.waiting import wait_for


class Freezer(NamedTuple):
    """Hierarchy of cgroups, with the file and words that freeze and thaw a cgroup."""

    top: Path
    file: str
    freeze: str
    thaw: str


_FREEZERS = (
    Freezer(Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
    # Version 2, beside version 1 and alone.
    Freezer(Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
    Freezer(Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"),
)
_numbers = itertools.count()


def _new_group(freezer: Freezer) -> Path | None:
    group = freezer.top / f"bootseer-test-{os.getpid()}-{next(_numbers)}"
    with contextlib.suppress(OSError):
        group.mkdir()
        if (group / freezer.file).exists():
            return group
        group.rmdir()
    return None


def freezers() -> list[Freezer]:
    """Return the freezers of this machine.

    A frozen process of version 1 cannot be killed; one of version 2 can.
    """
    found = []
    for freezer in _FREEZERS:
        if group := _new_group(freezer):
            group.rmdir()
            found.append(freezer)
    return found


@contextlib.contextmanager
def frozen(*pids: int, freezer: Freezer | None = None) -> Iterator[None]:
    """Freeze the processes `pids` for the length of the block; SIGCONT does not wake them.

    Raises: MissingError where cgroups cannot be made.
    """
    freezer = freezer or next(iter(freezers()), None)
    group = freezer and _new_group(freezer)
    if freezer is None or group is None:
        raise MissingError("cgroups cannot be frozen on this machine")
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        (group / freezer.file).write_text(freezer.freeze)
        yield
    finally:
        (group / freezer.file).write_text(freezer.thaw)
        wait_for(lambda: _is_removed(group), "an empty cgroup")


@contextlib.contextmanager
def in_own_cgroup(pid: int) -> Iterator[Path]:
    """Put process `pid`, and each child that it starts later, into a new cgroup; yield its folder.

    Writing "1" to `cgroup.kill` in the folder kills them all. Raises: MissingError.
    """
    with contextlib.ExitStack() as undo:
        for freezer in _FREEZERS:
            group = _new_group(freezer)
            if group is not None:
                undo.callback(wait_for, functools.partial(_is_removed, group), "an empty cgroup")
                if (group / "cgroup.kill").exists():
                    (group / "cgroup.procs").write_text(str(pid))
                    yield group
                    return
        raise MissingError("a cgroup cannot be killed on this machine (needs Linux 5.14)")


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Yield the folder of a new cgroup whose processes and page cache use at most `limit_bytes`.

    Raises: MissingError.
    """
    for top, file in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", top, f"bootseer-test-{os.getpid()}-{next(_numbers)}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                break
            group.rmdir()
    else:
        raise MissingError("a cgroup's memory cannot be limited on this machine")
    try:
        (group / file).write_text(str(limit_bytes))
        yield group
    finally:
        wait_for(lambda: _is_removed(group), "an empty cgroup")


def _is_removed(group: Path) -> bool:
    """Move the processes of a cgroup to its parent and remove it; return whether it is gone.

    A process that was killed in the cgroup stays in it for a moment.
    """
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
