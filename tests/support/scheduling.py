"""How the tests share the workers of pytest-xdist; tests/conftest.py has the hooks that ask.

A worker gets a whole file, for its fixtures' sake. All tests on HDFS are one worker's, though: that
is one cluster, a JVM of half a GiB, and a test that breaks it is alone with it. What takes long
begins first, so that no worker is left with it at the end.
"""

import os

import pytest
from xdist.scheduler import LoadGroupScheduling

HDFS = "hdfs"
# More than the cores, because the tests wait for a third of their time: for a server to be up, a
# lease to end, a process to be gone. Few more, because each may have torch or a JVM beside it, and
# because no test should wait for the processor until a deadline ends it.
_EXTRA_WORKERS = 2
_MAX_WORKERS = 6
# What takes longer than others, in this order. A file that should be here and is not costs some
# seconds at the end of a run, nothing else.
_LONG = (
    "tests/bootseer/launch/image/test_image.py",
    "tests/prefetch/resolve/",
    "tests/prefetch/container/test_container_run.py",
    "tests/prefetch/publish/test_image_zoo.py",
    "tests/snapshots/capture/test_crash.py",
    "tests/fuse/striped/mounted/test_mount_life.py",
    "tests/prefetch/snapshotter/test_containerd.py",
    "tests/prefetch/sources/test_layer_tar.py",
    "tests/fuse/formats/test_formats.py",
    "tests/prefetch/serve/test_large_tree.py",
    "tests/snapshots/relocation/test_kind",
    "tests/bootseer/launch/",
    "tests/prefetch/",
    "tests/snapshots/",
    "tests/fuse/striped/",
)


def worker_count() -> int:
    """For `-n auto`."""
    return min(len(os.sched_getaffinity(0)) + _EXTRA_WORKERS, _MAX_WORKERS)


def sort_long_first(items: list[pytest.Item]) -> None:
    """Tests on HDFS, then what takes long; each file's own order stays."""

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker(HDFS):
            return -1
        starts = (i for i, start in enumerate(_LONG) if item.nodeid.startswith(start))
        return next(starts, len(_LONG))

    items.sort(key=place)


def check_groups(items: list[pytest.Item]) -> None:
    """In a worker. Raises: UsageError where xdist has not put the group's name behind the tests'.

    Each worker would start an HDFS of its own then, and nobody would notice.
    """
    for item in items:
        if item.get_closest_marker(HDFS) and not item.nodeid.endswith(f"@{HDFS}"):
            raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
    """By file, but for the tests of a group, which have its name behind their own."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.endswith(f"@{HDFS}"):
            return HDFS
        return nodeid.split("::", 1)[0]
