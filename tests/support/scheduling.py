"""Distribution of the tests to the workers of pytest-xdist; tests/conftest.py has the hooks.

A worker takes a file at a time, or one test of a long file whose tests share no fixtures. The tests
on HDFS are taken together, since a cluster is a JVM of half a GiB that uses as much processor time
as its tests; so are the tests on Ceph's gateway, on moto and with torch. Two workers share a
server's tests, each with a server, if these would take half of the run. A test that breaks the
cluster has one of its own.
The longest unit begins first, by tests/durations.txt, so that no worker is left with it at the end.
`make durations` writes that file anew.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from xdist.scheduler import LoadGroupScheduling

SERVERS = ("hdfs", "rgw", "moto", "torch_host")
"""Servers that tests share, and so a worker: the names of their fixtures, and of a marker for tests
that get the fixture by `getfixturevalue`."""
_HALVED_FROM_S = 200.0
"""Length of the tests on one server from which two workers share them, each with a server."""
_HALF = "2"
_GROUPS = {name: server for server in SERVERS for name in (server, server + _HALF)}
"""Servers by the name of their units."""
DURATIONS = Path(__file__).parents[1] / "durations.txt"
"""File with a line for each test: its seconds and its node id."""
# More workers than cores, because the tests wait for most of their time: for a server's start, a
# lease's end, a process's end. Six workers used three quarters of two cores. Not many more, because
# each may have torch or a JVM beside it, and because no test should wait for the processor until
# its deadline.
_EXTRA_WORKERS = 6
_MAX_WORKERS = 8
_ALONE = "alone"
"""Group of the tests that are units of their own."""
_NOTED_FROM_S = 1.0
"""Least duration that is listed; shorter ones do not change the order."""
_SHORT_S = 0.1
"""Assumed duration of a test that is not listed."""
_SPLIT_FROM_S = 10.0
_SHARING = ("class", "module", "package")
"""Scopes of fixtures that several tests of a file share."""


def worker_count() -> int:
    """Return the number of workers for `-n auto`."""
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
    """Return a test's node id without the name of its group."""
    for group in (*_GROUPS, _ALONE):
        node_id = node_id.removesuffix(f"@{group}")
    return node_id


def arrange(items: list[pytest.Item], durations: Mapping[str, float]) -> None:
    """Mark each test's unit and sort the units, the longest first. Runs in a worker."""
    totals: dict[str, float] = defaultdict(float)
    for item in items:
        totals[_file_of(item.nodeid)] += durations.get(item.nodeid, _SHORT_S)
    shared = {_file_of(item.nodeid) for item in items if _shares(item)}
    groups = _groups(items, durations)
    units = {}
    for item in items:
        file = _file_of(item.nodeid)
        if server := _server_of(item):
            units[item] = groups[server, file]
            item.add_marker(pytest.mark.xdist_group(units[item]))
        elif totals[file] >= _SPLIT_FROM_S and file not in shared:
            units[item] = item.nodeid
            item.add_marker(pytest.mark.xdist_group(_ALONE))
        else:
            units[item] = file
    lengths: dict[str, float] = defaultdict(float)
    for item in items:
        lengths[units[item]] += durations.get(item.nodeid, _SHORT_S)
    # The order within a file stays.
    items.sort(key=lambda item: -lengths[units[item]])


def _groups(items: list[pytest.Item], durations: Mapping[str, float]) -> dict[tuple[str, str], str]:
    """Return the unit of each server's tests of each file."""
    lengths: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for item in items:
        if server := _server_of(item):
            lengths[server][_file_of(item.nodeid)] += durations.get(item.nodeid, _SHORT_S)
    found = {}
    for server, files in lengths.items():
        halves = {server: 0.0}
        if sum(files.values()) >= _HALVED_FROM_S:
            halves[server + _HALF] = 0.0
        for file in sorted(files, key=lambda one: -files[one]):
            group = min(halves, key=lambda one: halves[one])
            halves[group] += files[file]
            found[server, file] = group
    return found


def _server_of(item: pytest.Item) -> str:
    used = getattr(item, "fixturenames", ())
    return next((name for name in SERVERS if name in used or item.get_closest_marker(name)), "")


def _group_of(node_id: str) -> str:
    return node_id.rpartition("@")[2]


def _file_of(node_id: str) -> str:
    return node_id.split("::", 1)[0]


def _shares(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture that other tests of its file use, too."""
    info = getattr(item, "_fixtureinfo", None)
    definitions: Iterable[object] = () if info is None else info.name2fixturedefs.values()
    return any(
        getattr(one, "scope", "") in _SHARING
        for several in definitions
        if isinstance(several, Iterable)
        for one in several
    )


def check_groups(items: list[pytest.Item]) -> None:
    """Raise UsageError if xdist has not added the group's name to the tests' node ids.

    Each worker would then start an HDFS of its own, without any notice. Runs in a worker.
    """
    for item in items:
        server = _server_of(item)
        if server and _GROUPS.get(_group_of(item.nodeid)) != server:
            raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """Scheduling by file, except for single tests and for tests that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        group = _group_of(nodeid)
        if group in _GROUPS:
            return group
        return nodeid if nodeid.endswith(f"@{_ALONE}") else _file_of(nodeid)
