"""Processes frozen with their cgroup, as `docker pause` and batch systems do."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.waiting import wait_for


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
        pytest.skip("this machine lets nobody freeze a cgroup")
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        (group / freezer.file).write_text(freezer.freeze)
        yield
    finally:
        (group / freezer.file).write_text(freezer.thaw)
        wait_for(lambda: _is_removed(group), "an empty cgroup")


def _is_removed(group: Path) -> bool:
    """Moves out who is in it; what was killed in it takes a moment to be gone."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
