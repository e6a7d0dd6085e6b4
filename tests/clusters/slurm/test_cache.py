"""The node's cache while jobs use it: a full disk, and changed bytes."""

import hashlib
import os
from collections.abc import Iterator

import pytest

from testbed.images.building import Member, write_layout
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.pages import simple_cluster
from tests.clusters.slurm.test_faults import assert_clean, script

pytestmark = pytest.mark.needs("mount", "fuse")

CACHE = "/var/cache/bootseer"
CONTENT = os.urandom(32 << 20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Slurm with an image in the folder that its machines share."""
    with simple_cluster() as running:
        write_layout(running.home / "image", [[Member("content", data=CONTENT)]])
        yield running


def _job(cluster: SlurmCluster, *lines: str) -> int:
    mount = "mkdir -p /tmp/tree && bootseer image mount oci:/home/image /tmp/tree || exit 3"
    text = script(mount, *lines, "code=$?; bootseer unmount /tmp/tree; exit $code")
    return cluster.submit("-wn1", "-n1", "-o", "cache.out", script=text)


def _said(cluster: SlurmCluster, job: int) -> str:
    state = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert_clean(cluster)
    return state + " " + (cluster.home / "alice/cache.out").read_text()


def _is_right_or(error: str, said: str) -> bool:
    if said.startswith("COMPLETED"):
        return hashlib.sha256(CONTENT).hexdigest() in said
    return error in said


def test_a_job_on_a_full_disk_reads_right_bytes_or_an_error(cluster: SlurmCluster) -> None:
    machine = cluster.machines["n1"]
    small = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=1777", "none", CACHE]
    assert machine.run(*small).returncode == 0
    try:
        said = _said(cluster, _job(cluster, "sha256sum /tmp/tree/content"))
    finally:
        machine.run("umount", CACHE)
    assert _is_right_or("No space left on device", said), said


def test_bytes_that_changed_in_the_cache_are_not_what_a_job_reads(cluster: SlurmCluster) -> None:
    """An earlier job has filled the cache. (A server verifies bytes at their first use.)"""
    read = "sha256sum /tmp/tree/content"
    assert _said(cluster, _job(cluster, read)).startswith("COMPLETED")
    flipped = 0
    for path in cluster.machines["n1"].path(CACHE).rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for offset in range(5000, len(data), 1 << 16):
                data[offset] ^= 1
                flipped += 1
            with path.open("r+b") as file:
                file.write(data)
    assert flipped
    said = _said(cluster, _job(cluster, read))
    assert _is_right_or("Input/output error", said), said
