"""Bootseer's servers and the control groups of jobs, of both versions.

Tests which servers are in a job's group, what ends with the group, and its memory limit.
"""

import json
import re
from collections.abc import Iterator

import pytest

from testbed.needs import MissingError, require
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.machine import UNIFIED, has_groups
from testbed.slurm.pages import SHARED, simple_cluster
from tests.clusters.slurm.test_faults import SRUN, assert_clean, script

pytestmark = pytest.mark.needs("mount", "fuse")

LIMITS = {
    "configuration": "TaskPlugin=task/cgroup\nSelectTypeParameters=CR_CPU_Memory\n",
    "hierarchies": ("freezer", "memory", "cpuset"),
    "files": {
        "slurm/cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"
        "ConstrainRAMSpace=yes\nConstrainCores=yes\n"
    },
}
# Slurm uses version 2 only if there is no other. On a machine that has both, a preloaded library
# hides version 1: in the list of a process's groups only the line of version 2 is left.
ONLY_UNIFIED = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
int open(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  int fd = syscall(SYS_openat, AT_FDCWD, path, flags, va_arg(more, int));
  va_end(more);
  size_t length = strlen(path);
  if (fd < 0 || strncmp(path, "/proc/", 6) || strcmp(path + length - 7, "/cgroup")) return fd;
  char text[4096];
  ssize_t count = read(fd, text, sizeof text - 1);
  close(fd);
  text[count > 0 ? count : 0] = 0;
  char *line = strstr(text, "0::");
  int shown = memfd_create("cgroup", 0);
  if (line && write(shown, line, strlen(line)) < 0) return -1;
  lseek(shown, 0, SEEK_SET);
  return shown;
}
int open64(const char *path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  int mode = va_arg(more, int);
  va_end(more);
  return open(path, flags, mode);
}
"""
SHOWN = """
gcc -shared -fPIC -o /run/only.so /etc/slurm/only.c
echo $$ > /sys/fs/cgroup/cgroup.procs
LD_PRELOAD=/run/only.so exec "$@"
"""
VERSION_2 = {
    "hierarchies": (UNIFIED,),
    "files": {"slurm/only.c": ONLY_UNIFIED},
    "slurmd_prefix": ("sh", "-ec", SHOWN, "sh"),
}


@pytest.fixture(scope="module", params=[LIMITS, VERSION_2], ids=["v1", "v2"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """Slurm whose jobs are in control groups, with limits for version 1."""
    options = request.param
    if not has_groups(*options["hierarchies"]):
        raise MissingError(f"needs control groups: {', '.join(options['hierarchies'])}")
    require(programs=["gcc"])
    with simple_cluster(**options) as running:
        yield running


CHECKPOINT = f"--checkpoint file://{SHARED}/ckpt:/tmp/ckpt"
RUN = f"{SRUN} bootseer run {CHECKPOINT} --"
# Groups of the servers of checkpoint folders, a line each.
GROUPS = (
    'for pid in $(pgrep -f "mounted.(server|job_mount)"); '
    'do grep -E "freezer|0::" /proc/$pid/cgroup; done'
)


def _output(cluster: SlurmCluster, *lines: str, comment: str = "") -> list[str]:
    """Return the output of a job of several steps on one node."""
    words = ("-wn1", "-n1", "-o", "steps.out", f"--comment={comment}")
    job = cluster.submit(*words, script=script("exec 2>&1", *lines))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    assert_clean(cluster)
    return (cluster.home / "alice/steps.out").read_text().splitlines()


def test_servers_of_a_step_end_with_it_and_the_next_step_mounts_again(
    cluster: SlurmCluster,
) -> None:
    # Its server unmounts or is killed before: the file is not visible in both cases.
    gone = "while [ -e /tmp/ckpt/a ]; do sleep 0.1; done"
    lines = (f"{RUN} sh -c 'echo a > /tmp/ckpt/a; {GROUPS}'", gone, "echo next")
    said = _output(cluster, *lines, f"{RUN} cat /tmp/ckpt/a")
    groups = [line for line in said if re.search(r"/job_\d+/step_0", line)]
    assert len(groups) >= 2, said
    assert said[-2:] == ["next", "a"]


def test_what_a_prolog_mounts_lasts_from_step_to_step(cluster: SlurmCluster) -> None:
    lines = (f"{RUN} sh -c 'echo b > /tmp/ckpt/b'", "cat /tmp/ckpt/b", f"{RUN} ls /tmp/ckpt/b")
    said = _output(cluster, *lines, GROUPS, comment=f"bootseer standby {CHECKPOINT}")
    assert said[:2] == ["b", "/tmp/ckpt/b"], said
    assert not any("/job_" in line for line in said)


SAVING = """
import os
with open("/tmp/ckpt/whole", "wb") as file:
    file.write(b"w" * (1 << 20))
try:
    for number in range(3):
        with open(f"/tmp/ckpt/large-{number}", "wb") as file:
            for _ in range(100):
                file.write(os.urandom(1 << 20))
        print("saved", f"large-{number}", flush=True)
except OSError as error:
    print("failed", error)
"""


@pytest.mark.parametrize("limit", ["400M", "110M"])
def test_a_save_beyond_the_memory_limit_is_whole_or_absent(
    cluster: SlurmCluster, limit: str
) -> None:
    """Servers count as the job: with a large limit they stay below it, with a small one they are
    killed."""
    if "memory" not in cluster.hierarchies:
        raise MissingError("the controller of memory is used in version 1 on this machine")
    (cluster.home / "saving.py").write_text(SAVING)
    cluster.run("sh", "-c", f"rm -rf {SHARED}/ckpt")
    words = ("-wn1", "-n1", f"--mem={limit}", "-o", "memory.out")
    job = cluster.submit(*words, script=script(f"{RUN} python /home/saving.py"))
    end = cluster.wait_for_state(job, "COMPLETED", "FAILED", "OUT_OF_MEMORY")
    assert_clean(cluster)
    text = (cluster.home / "alice/memory.out").read_text()
    ls = ("bootseer", "checkpoint", "ls", "--json", f"file://{SHARED}/ckpt")
    entries = json.loads(cluster.run(*ls, user="alice") or "[]")
    found = {entry["name"]: entry["bytes"] for entry in entries if entry["type"] == "file"}
    for name, size in found.items():
        assert size == (1 << 20 if name == "whole" else 100 << 20), found
    saved = set(re.findall(r"saved (\S+)", text))
    assert saved <= set(found), text
    if limit == "400M" or end == "COMPLETED":
        assert (end, len(saved)) == ("COMPLETED", 3), text
