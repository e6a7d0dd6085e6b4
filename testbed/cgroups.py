"""Processes frozen with their cgroup, as `docker pause` and batch systems do, or killed with it, as
containers are."""

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
    """A hierarchy of cgroups that can be frozen."""

    top: Path
    file: str
    freeze: str
    thaw: str


_FREEZERS = (
    Freezer(Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
    # cgroup v2, beside v1 and alone.
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
    """Those of this machine: v1 lets nobody end what is frozen, v2 does."""
    found = []
    for freezer in _FREEZERS:
        if group := _new_group(freezer):
            group.rmdir()
            found.append(freezer)
    return found


@contextlib.contextmanager
def frozen(*pids: int, freezer: Freezer | None = None) -> Iterator[None]:
    """They do not run in here, whoever sends them SIGCONT. Skips where cgroups cannot be made."""
    freezer = freezer or next(iter(freezers()), None)
    group = freezer and _new_group(freezer)
    if freezer is None or group is None:
        raise MissingError("this machine lets nobody freeze a cgroup")
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
def contained(pid: int) -> Iterator[Path]:
    """Process `pid`, and all that it starts from now on, in a cgroup of its own. Writing to its
    `cgroup.kill` ends them all. Skips where that cannot be."""
    with contextlib.ExitStack() as undo:
        for freezer in _FREEZERS:
            group = _new_group(freezer)
            if group is not None:
                undo.callback(wait_for, functools.partial(_is_removed, group), "an empty cgroup")
                if (group / "cgroup.kill").exists():
                    (group / "cgroup.procs").write_text(str(pid))
                    yield group
                    return
        raise MissingError("this machine lets nobody kill a cgroup (Linux 5.14 does)")


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A cgroup whose processes, with the pages that they read, hold no more than that. Skips where
    that cannot be."""
    for top, file in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", top, f"bootseer-test-{os.getpid()}-{next(_numbers)}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                break
            group.rmdir()
    else:
        raise MissingError("this machine lets nobody limit a cgroup's memory")
    try:
        (group / file).write_text(str(limit_bytes))
        yield group
    finally:
        wait_for(lambda: _is_removed(group), "an empty cgroup")


def _is_removed(group: Path) -> bool:
    """Moves out who is in it; what was killed in it takes a moment to be gone."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
