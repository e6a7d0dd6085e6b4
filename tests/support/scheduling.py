"""How the tests share the workers of pytest-xdist; tests/conftest.py has the hooks that ask.

The unit that a worker takes is a file, or one test of a file that takes long and has no fixtures of
its own to share. The tests on HDFS are one unit, since a cluster is a JVM of half a GiB that takes
as much processor time as its tests; one that breaks the cluster is alone with it. So are those on
Ceph's gateway. The longest unit
begins first, by tests/durations.txt, so that no worker is left with it at the end. `make durations`
writes that file anew.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from xdist.scheduler import LoadGroupScheduling

SERVERS = ("hdfs", "rgw")
"""The markers of tests that share one server, and so a worker."""
DURATIONS = Path(__file__).parents[1] / "durations.txt"
"""A line a test: its seconds and its node id."""
# More than the cores, because the tests wait for a third of their time: for a server to be up, a
# lease to end, a process to be gone. Few more, because each may have torch or a JVM beside it, and
# because no test should wait for the processor until a deadline ends it.
_EXTRA_WORKERS = 4
_MAX_WORKERS = 6
_ALONE = "alone"
"""The group's name of a test that is a unit of its own."""
_NOTED_FROM_S = 1.0
"""What takes less changes the order of nothing."""
_SHORT_S = 0.1
"""What a test counts that is not listed."""
_SPLIT_FROM_S = 10.0
_SHARING = ("class", "module", "package")
"""Scopes of fixtures that several tests of a file share."""


def worker_count() -> int:
    """For `-n auto`."""
    return min(len(os.sched_getaffinity(0)) + _EXTRA_WORKERS, _MAX_WORKERS)


def read_durations(text: str) -> dict[str, float]:
    """Return the seconds of each listed test, by its node id."""
    lines = (line.partition(" ") for line in text.splitlines())
    return {node_id: float(seconds) for seconds, _, node_id in lines}


def durations_text(durations: Mapping[str, float]) -> str:
    """Return the text of tests/durations.txt."""
    noted = sorted(item for item in durations.items() if item[1] >= _NOTED_FROM_S)
    return "".join(f"{seconds:.1f} {node_id}\n" for node_id, seconds in noted)


def bare(node_id: str) -> str:
    """Return a test's node id without the name of a group behind it."""
    for group in (*SERVERS, _ALONE):
        node_id = node_id.removesuffix(f"@{group}")
    return node_id


def arrange(items: list[pytest.Item], durations: Mapping[str, float]) -> None:
    """Mark each test's unit, and sort the units, the longest first. In a worker."""
    totals: dict[str, float] = defaultdict(float)
    for item in items:
        totals[_file_of(item.nodeid)] += durations.get(item.nodeid, _SHORT_S)
    shared = {_file_of(item.nodeid) for item in items if _shares(item)}
    units = {}
    for item in items:
        file = _file_of(item.nodeid)
        if server := _server_of(item):
            units[item] = server
            item.add_marker(pytest.mark.xdist_group(server))
        elif totals[file] >= _SPLIT_FROM_S and file not in shared:
            units[item] = item.nodeid
            item.add_marker(pytest.mark.xdist_group(_ALONE))
        else:
            units[item] = file
    lengths: dict[str, float] = defaultdict(float)
    for item in items:
        lengths[units[item]] += durations.get(item.nodeid, _SHORT_S)
    # Each file's own order stays.
    items.sort(key=lambda item: -lengths[units[item]])


def _server_of(item: pytest.Item) -> str:
    return next((name for name in SERVERS if item.get_closest_marker(name)), "")


def _file_of(node_id: str) -> str:
    return node_id.split("::", 1)[0]


def _shares(item: pytest.Item) -> bool:
    """Whether a test uses a fixture that others of its file use, too."""
    info = getattr(item, "_fixtureinfo", None)
    definitions: Iterable[object] = () if info is None else info.name2fixturedefs.values()
    return any(
        getattr(one, "scope", "") in _SHARING
        for several in definitions
        if isinstance(several, Iterable)
        for one in several
    )


def check_groups(items: list[pytest.Item]) -> None:
    """In a worker. Raises: UsageError where xdist has not put the group's name behind the tests'.

    Each worker would start an HDFS of its own then, and nobody would notice.
    """
    for item in items:
        server = _server_of(item)
        if server and not item.nodeid.endswith(f"@{server}"):
            raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """By file, but for tests that are alone, and for those on a server that is shared."""

    def _split_scope(self, nodeid: str) -> str:
        for server in SERVERS:
            if nodeid.endswith(f"@{server}"):
                return server
        return nodeid if nodeid.endswith(f"@{_ALONE}") else _file_of(nodeid)
