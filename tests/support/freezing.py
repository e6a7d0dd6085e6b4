"""Processes frozen with their cgroup, as `docker pause` and batch systems do."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

# (folder, file of a group, what to write to it to freeze and to go on): cgroup v1, then v2.
_KINDS = (
    ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"),
    ("/sys/fs/cgroup/unified", "cgroup.freeze", "1", "0"),
    ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
)


def _new_group() -> tuple[Path, str, str, str]:
    for top, name, freeze, thaw in _KINDS:
        group = Path(top) / f"bootseer-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / name).exists():
                return group, name, freeze, thaw
            group.rmdir()
    pytest.skip("this machine lets nobody freeze a cgroup")


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """They do not run in here, whoever sends them SIGCONT. Skips where cgroups cannot be made."""
    group, name, freeze, thaw = _new_group()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        (group / name).write_text(freeze)
        yield
    finally:
        (group / name).write_text(thaw)
        for pid in pids:
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(str(pid))
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "an empty cgroup")
        group.rmdir()
