"""State after jobs that were cancelled or killed, or whose node was lost."""

import re
from collections.abc import Iterator

import pytest

from testbed.hdfs.cluster import MiniHdfs
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.machine import SlurmMachine
from testbed.waiting import wait_for

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]

# Saves a whole file, then begins another one, which it writes until it is killed.
SAVING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = sys.argv[1]
with open(f"{folder}/whole", "wb") as file:
    file.write(b"w" * (3 << 20))
with open(f"{folder}/half", "wb") as file:
    while True:
        file.write(os.urandom(1 << 20))
        open("/home/alice/saving", "w").close()
        time.sleep(0.01)
"""
# Counts on from the newest checkpoint, slowly.
COUNTING = """
import os, sys, time
folder, until = sys.argv[1], int(sys.argv[2])
step = max((int(name) for name in os.listdir(folder)), default=0)
print("attempt", os.environ["BOOTSEER_ATTEMPT"], "begins at", step, flush=True)
while step < until:
    time.sleep(0.5)
    step += 1
    with open(f"{folder}/{step}", "w") as file:
        file.write(str(step))
"""
# The same, but it is nearly always in a save, and it checks the files of the attempt before.
LARGE = """
import os, sys, time
folder, until, size = sys.argv[1], 16, 3 << 20
saved = sorted(int(name) for name in os.listdir(folder))
for step in saved:
    with open(f"{folder}/{step}", "rb") as file:
        assert file.read() == bytes([step]) * size, f"{step} is no whole checkpoint"
with open(sys.argv[2]) as file:
    assert file.read() == "by the set-up"
step = max(saved, default=0)
print("attempt", os.environ["BOOTSEER_ATTEMPT"], "begins at", step, flush=True)
while step < until:
    step += 1
    with open(f"{folder}/{step}", "wb") as file:
        for _ in range(12):
            file.write(bytes([step]) * (size // 12))
            time.sleep(0.05)
"""

SRUN = "srun --overlap"
"""Flags for steps one after another: without them `srun` waits long for the end of the last one."""


@pytest.fixture(autouse=True)
def _clean(cluster: SlurmCluster) -> Iterator[None]:
    for name, text in (("saving", SAVING), ("counting", COUNTING), ("large", LARGE)):
        (cluster.home / f"{name}.py").write_text(text)
    (cluster.home / "alice/saving").unlink(missing_ok=True)
    yield
    cluster.run("scancel", "--full", "--user=alice")
    cluster.run("scancel", "--full", "--user=bob")
    cluster.wait_for_idle()


def assert_clean(cluster: SlurmCluster) -> None:
    """Assert that no node has a mount or a process of a job, and that none is drained."""
    cluster.wait_for_idle()
    for name in cluster.nodes:
        machine = cluster.machines[name]
        assert machine.mounts() == [], cluster.logs()
        # A server ends a moment after its unmount.
        wait_for(lambda machine=machine: not of_jobs(machine), f"the end of {of_jobs(machine)}")  # type: ignore[misc]


def of_jobs(machine: SlurmMachine) -> list[str]:
    """Return the processes that are not Slurm's own."""
    return [line for line in machine.processes() if not re.match(r"(munged|slurmd) |\[", line)]


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/sh", *lines, ""])


def listed(cluster: SlurmCluster, url: str) -> str:
    return cluster.run("bootseer", "checkpoint", "ls", url, user="alice")


def test_a_job_that_is_cancelled_in_a_set_up_leaves_nothing(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    set_up = "touch /home/alice/saving; sleep 600; mkdir -p /tmp/env; touch /tmp/env/x"
    run = f"bootseer run --setup '{set_up}' --target /tmp/env --checkpoint {hdfs_url}:/tmp/ckpt"
    job = cluster.submit("-N1", "-o", "set-up.out", script=script(f"srun {run} -- true"))
    wait_for((cluster.home / "alice/saving").exists, "the set-up")
    cluster.run("scancel", str(job))
    assert cluster.wait_for_state(job, "CANCELLED", "FAILED", "COMPLETED") == "CANCELLED"
    assert_clean(cluster)
    # No lease blocks the next job, and nothing was stored.
    again = f"sed s/sleep\\ 600/true/ > /dev/null; {run.replace('sleep 600', 'true')}"
    job = cluster.submit("-N1", "-o", "again.out", script=script(f"{again} -- ls /tmp/env/x"))
    assert cluster.wait_for_state(job, "FAILED", "COMPLETED") == "COMPLETED", cluster.logs()
    assert_clean(cluster)


def test_a_job_that_is_cancelled_in_a_save_leaves_no_half_of_a_file(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- python /home/saving.py /tmp/ckpt"
    job = cluster.submit("-N1", "-o", "save.out", script=script(f"srun {run}"))
    wait_for((cluster.home / "alice/saving").exists, "the save")
    cluster.run("scancel", str(job))
    cluster.wait_for_state(job, "CANCELLED")
    assert_clean(cluster)
    assert "whole" in listed(cluster, hdfs_url)
    assert "half" not in listed(cluster, hdfs_url)


def test_everything_of_a_job_is_killed_and_its_epilog_cleans_up(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- python /home/saving.py /tmp/ckpt"
    job = cluster.submit("-wn1", "-o", "kill.out", script=script(f"srun {run}"))
    wait_for((cluster.home / "alice/saving").exists, "the save")
    assert cluster.machines["n1"].mounts() == ["/tmp/ckpt"]
    cluster.machines["n1"].run("pkill", "-9", "-u", "alice")
    cluster.wait_for_state(job, "FAILED", "CANCELLED")
    assert_clean(cluster)
    assert "half" not in listed(cluster, hdfs_url)


def test_a_lost_node_has_its_job_go_on_elsewhere(cluster: SlurmCluster, hdfs: MiniHdfs) -> None:
    """Slurm requeues the job unless it has --no-requeue; the returning node is clean."""
    url = f"{hdfs.url}/lost"
    lines = [
        f"srun bootseer run --checkpoint {url}-{name}:/tmp/ckpt-{name} -- "
        f"python /home/counting.py /tmp/ckpt-{name} 30"
        for name in ("kept", "ended")
    ]
    common = ("-n1", "--open-mode=append", "--requeue")
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    kept = cluster.submit(*common, "-o", "kept.out", script=script(lines[0]))
    ended = cluster.submit(*common[:-1], "--no-requeue", "-o", "ended.out", script=script(lines[1]))
    for name in ("kept", "ended"):
        wait_for(lambda name=name: re.search(r"\b3$", listed(cluster, f"{url}-{name}"), re.M), name)  # type: ignore[misc]
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster.lose_node("n1")
    assert cluster.wait_for_state(ended, "NODE_FAIL", "COMPLETED") == "NODE_FAIL"
    assert cluster.wait_for_state(kept, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    text = (cluster.home / "alice/kept.out").read_text()
    (first, second) = re.findall(r"attempt (\d) begins at (\d+)", text)
    assert first == ("0", "0")
    assert second[0] == "1"
    assert int(second[1]) >= 3
    assert len(cluster.machines["n1"].mounts()) == 2
    cluster.return_node("n1")
    cluster.wait_for_idle()
    # This user's first job there finds a clean node.
    job = cluster.submit("-wn1", "-o", "back.out", script=script("cat /proc/self/mountinfo"))
    cluster.wait_for_state(job, "COMPLETED")
    assert "/tmp/ckpt" not in (cluster.home / "alice/back.out").read_text()
    assert_clean(cluster)


@pytest.mark.parametrize("is_back", ["soon", "later"])
def test_a_node_loses_its_power_under_a_job(
    cluster: SlurmCluster, hdfs_url: str, is_back: str
) -> None:
    """The node's processes, mounts and control groups are gone; its disks are kept.

    The job goes on there, or on the other node if this one is away for longer.
    """
    target = f"/tmp/back-{is_back}"
    set_up = f'mkdir -p {target}; printf "by the set-up" > {target}/made'
    run = f"srun bootseer run --setup '{set_up}' --target {target} --checkpoint "
    run += f"{hdfs_url}:/tmp/ckpt -- python /home/large.py /tmp/ckpt {target}/made"
    where = ["-wn1"] if is_back == "soon" else []
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    words = ("-n1", *where, "--requeue", "--open-mode=append", "-o", "power.out")
    (cluster.home / "alice/power.out").unlink(missing_ok=True)
    job = cluster.submit(*words, script=script(run))
    wait_for(lambda: re.search(r"\b2$", listed(cluster, hdfs_url), re.M), "two steps")
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster.lose_power("n1")
    if is_back == "soon":
        cluster.return_node("n1")
        _let_the_controller_miss(cluster, job)
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
    text = (cluster.home / "alice/power.out").read_text()
    first, second = re.findall(r"attempt (\d) begins at (\d+)", text)
    assert first == ("0", "0")
    assert second[0] == "1"
    assert int(second[1]) >= 2
    assert text.count("bootseer: stored snapshot") == 1, text
    if is_back == "later":
        cluster.return_node("n1")
    assert_clean(cluster)
    # The cache's content from before the failure does no harm.
    job = cluster.submit("-wn1", "-o", "after.out", script=script(run))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    assert "begins at 16" in (cluster.home / "alice/after.out").read_text()
    assert_clean(cluster)


def _let_the_controller_miss(cluster: SlurmCluster, job: int) -> None:
    """Restart the slurmd of n1 until the controller notices that the running job is not there.

    The controller notices that when the node registers: at slurmd's start, and once in some twenty
    pings of SlurmdTimeout/3 s each. It ignores jobs that may still be beginning, for
    BatchStartTimeout and ten seconds, so the first restart may be too early.
    """

    def is_missed() -> bool:
        if cluster.state(job) != "RUNNING":
            return True
        cluster.kill_slurmd("n1")
        cluster.start_slurmd("n1")
        return False

    wait_for(is_missed, "the end of the job", timeout_s=240.0, interval_s=10.0)


def test_the_slurmd_of_a_node_is_killed_under_a_job(cluster: SlurmCluster, hdfs_url: str) -> None:
    """The slurmd is restarted, and the job does not notice."""
    run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- python /home/counting.py /tmp/ckpt 10"
    job = cluster.submit("-wn1", "-o", "slurmd.out", script=script(f"srun {run}"))
    wait_for(lambda: re.search(r"\b2$", listed(cluster, hdfs_url), re.M), "two steps")
    cluster.kill_slurmd("n1")
    cluster.start_slurmd("n1")
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
    assert re.search(r"\b10$", listed(cluster, hdfs_url), re.M)
    assert_clean(cluster)


def test_the_daemons_of_a_job_are_killed_and_it_lives(cluster: SlurmCluster, hdfs_url: str) -> None:
    """No daemon can kill the job's processes: its epilog ends the server, and with it the save."""
    run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- python /home/saving.py /tmp/ckpt"
    words = ("-wn1", "--no-requeue", "-o", "daemons.out")
    job = cluster.submit(*words, script=script(f"srun {run}"))
    wait_for((cluster.home / "alice/saving").exists, "the save")
    cluster.machines["n1"].run("pkill", "-9", "slurmstepd")
    cluster.kill_slurmd("n1")
    cluster.start_slurmd("n1")
    _let_the_controller_miss(cluster, job)
    assert_clean(cluster)
    assert "whole" in listed(cluster, hdfs_url)
    assert "half" not in listed(cluster, hdfs_url)
