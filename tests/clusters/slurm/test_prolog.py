"""The script that is slurmd's prolog and epilog.

Tests its work for a job, its protection against other users, and that it never blocks a job or
drains a node.
"""

import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from testbed.images.building import Member, write_layout
from testbed.slurm.cluster import USERS, SlurmCluster
from testbed.waiting import wait_for
from tests.clusters.slurm.test_faults import COUNTING, assert_clean, listed, script

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]

LOG = "/var/log/bootseer-slurm.log"


@pytest.fixture(autouse=True)
def _clean(cluster: SlurmCluster) -> Iterator[None]:
    (cluster.home / "counting.py").write_text(COUNTING)
    for name in cluster.nodes:
        cluster.machines[name].path(LOG).unlink(missing_ok=True)
    yield
    for user in ("alice", "bob"):
        cluster.run("scancel", "--full", f"--user={user}")
    cluster.wait_for_idle()


def said(cluster: SlurmCluster, name: str) -> list[str]:
    """Return the lines of a node's log."""
    path = cluster.machines[name].path(LOG)
    return path.read_text().splitlines() if path.exists() else []


def test_checkpoints_are_mounted_before_the_job_that_asks_for_it(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    comment = f"bootseer standby --checkpoint {hdfs_url}:/tmp/ckpt"
    run = f"srun bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- touch /tmp/ckpt/mine"
    lines = ("cat /proc/self/mountinfo", run)
    job = cluster.submit("-wn1", f"--comment={comment}", "-o", "standby.out", script=script(*lines))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    output = (cluster.home / "alice/standby.out").read_text()
    assert "/tmp/ckpt" in output
    assert_clean(cluster)
    assert "mine" in listed(cluster, hdfs_url)
    # The job took over the mount, as its timeline shows.
    found = cluster.controller.run("sh", "-c", "cat $(find ~ -name '*.jsonl')", user="alice").stdout
    assert '"live"' in found


def test_a_folder_that_another_user_has_taken_is_the_users_again(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    """Otherwise the job and its epilog would use different folders, and its mounts would stay."""
    machine = cluster.machines["n1"]
    places = [
        f"{top}/bootseer-{USERS['alice']}" for top in ("/run/bootseer", "/var/cache/bootseer")
    ]
    machine.run("rm", "-rf", *places)
    assert machine.run("ln", "-s", "/home/alice", places[0], user="bob").returncode == 0
    assert machine.run("mkdir", places[1], user="bob").returncode == 0
    comment = f"bootseer standby --checkpoint {hdfs_url}:/tmp/ckpt"
    run = f"srun bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- touch /tmp/ckpt/mine"
    words = ("-wn1", f"--comment={comment}", "-o", "taken.out")
    job = cluster.submit(*words, script=script("mountpoint /tmp/ckpt", run))
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    assert "is a mountpoint" in (cluster.home / "alice/taken.out").read_text()
    assert_clean(cluster)
    for place in places:
        assert machine.run("stat", "-c", "%U %a", place).stdout == "alice 700\n"
    assert not any("is not used" in line for line in said(cluster, "n1")), said(cluster, "n1")


def test_a_folder_of_all_users_that_is_full_drains_no_node(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    machine = cluster.machines["n1"]
    small = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "none", "/run/bootseer"]
    assert machine.run(*small).returncode == 0
    try:
        machine.run("sh", "-c", "head -c 100000 /dev/zero > /run/bootseer/full", user="bob")
        run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- true"
        job = cluster.submit("-wn1", "-o", "full.out", script=script(f"srun {run}"))
        assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "FAILED"
        assert "No space left on device" in (cluster.home / "alice/full.out").read_text()
        assert_clean(cluster)
    finally:
        machine.run("umount", "--lazy", "/run/bootseer")


def test_an_epilog_that_runs_several_times_at_once_says_nothing(
    cluster: SlurmCluster, hdfs_url: str
) -> None:
    """An epilog runs again if slurmd was killed in it, and beside those of the user's other
    jobs."""
    run = f"bootseer run --checkpoint {hdfs_url}:/tmp/ckpt -- sh -c 'kill -9 -1'"
    machine = cluster.machines["n1"]
    epilog = machine.path("/etc/slurm/epilog.d/bootseer")
    text = epilog.read_text()
    epilog.write_text("#!/bin/sh\n")
    try:
        job = cluster.submit("-wn1", "-o", "/dev/null", script=script(f"srun {run}"))
        cluster.wait_for_state(job, "FAILED", "COMPLETED")
        cluster.wait_for_idle()
        assert machine.mounts() == ["/tmp/ckpt"]
    finally:
        epilog.write_text(text)
    uid = str(USERS["alice"])
    known = {"JOB_ID": str(job), "JOB_UID": uid, "JOB_GID": uid, "SCRIPT_CONTEXT": "epilog_slurmd"}
    variables = [f"SLURM_{name}={value}" for name, value in known.items()]
    command = machine.command("env", *variables, "/etc/slurm/epilog.d/bootseer")
    epilogs = [subprocess.Popen(command) for _ in range(4)]
    assert [one.wait(60) for one in epilogs] == [0] * 4
    assert_clean(cluster)
    assert said(cluster, "n1") == []


SILENT = "import socket, time; one = socket.create_server(('127.0.0.1', 7999)); time.sleep(600)"


def _listens(cluster: SlurmCluster) -> bool:
    return ":7999" in cluster.machines["n1"].run("ss", "-ltn").stdout


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_store_that_cannot_be_reached_costs_one_line(cluster: SlurmCluster, how: str) -> None:
    if how == "is silent":
        cluster.machines["n1"].start_process("python", "-c", SILENT)
        wait_for(lambda: _listens(cluster), "a server")
    try:
        comment = "bootseer standby --checkpoint hdfs://127.0.0.1:7999/x:/tmp/ckpt"
        job = cluster.submit("-wn1", f"--comment={comment}", "-o", "no.out", script=script("true"))
        assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    finally:
        cluster.machines["n1"].run("pkill", "-f", "create_server")
    (line,) = said(cluster, "n1")
    assert f"prolog of job {job}: " in line
    assert_clean(cluster)


def test_a_job_that_is_cancelled_in_its_prolog_leaves_nothing(cluster: SlurmCluster) -> None:
    cluster.machines["n1"].start_process("python", "-c", SILENT)
    wait_for(lambda: _listens(cluster), "a server")
    try:
        comment = "bootseer standby --checkpoint hdfs://127.0.0.1:7999/x:/tmp/ckpt"
        job = cluster.submit("-wn1", f"--comment={comment}", "-o", "no.out", script=script("true"))
        wait_for(lambda: "slurm prolog" in str(cluster.machines["n1"].processes()), "it")
        cluster.run("scancel", str(job))
        cluster.wait_for_state(job, "CANCELLED")
    finally:
        cluster.machines["n1"].run("pkill", "-f", "create_server")
    assert_clean(cluster)


HOSTILE = (
    "bootseer standby --checkpoint $(touch /tmp/owned):/tmp/ckpt",
    "bootseer standby --setup 'touch /tmp/owned' --checkpoint a:/b",
    "bootseer standby --checkpoint 'file:///etc:/tmp/x' --checkpoint `touch /tmp/owned`",
    "bootseer standby --checkpoint '\x1b]0;a\nFri root: all is well",
    "'; touch /tmp/owned; '",
)


def test_what_users_choose_is_not_believed(cluster: SlurmCluster) -> None:
    machine = cluster.machines["n1"]
    # The user's configuration and packages are not read: the epilog runs outside of the job.
    home = cluster.home / "alice"
    planted = home / ".local/lib/python3.11/site-packages"
    planted.mkdir(parents=True)
    (planted / "planted.pth").write_text("import os; os.close(os.open('/tmp/owned', os.O_CREAT))\n")
    (home / ".config/bootseer").mkdir(parents=True)
    (home / ".config/bootseer/bootseer.toml").write_text('run_dir = "/tmp/owned"\n')
    try:
        for comment in HOSTILE:
            words = ("-wn1", f"--comment={comment}", "-J", "$(touch /tmp/owned)", "-o", "/dev/null")
            job = cluster.submit(*words, "--export=ALL,LD_PRELOAD=/tmp/x.so", script=script("true"))
            cluster.wait_for_state(job, "COMPLETED", "FAILED")
    finally:
        (planted / "planted.pth").unlink()
        (home / ".config/bootseer/bootseer.toml").unlink()
    assert_clean(cluster)
    assert not machine.path("/tmp/owned").exists()
    for line in said(cluster, "n1"):
        assert re.match(r"[\d-]+ [\d:]+ (prolog|epilog) of job \d+: ", line), line
        assert line.isprintable()


def test_the_job_of_another_user_keeps_its_mounts(cluster: SlurmCluster, hdfs_url: str) -> None:
    """So does another job of the same user."""
    jobs = {}
    for user, name, until in (("alice", "short", 2), ("alice", "long", 30), ("bob", "theirs", 30)):
        run = f"bootseer run --checkpoint {hdfs_url}-{name}:/tmp/{name} -- "
        lines = script(f"srun {run} python /home/counting.py /tmp/{name} {until}")
        jobs[name] = cluster.submit("-wn1", "-n1", "-o", f"{name}.out", user=user, script=lines)
    machine = cluster.machines["n1"]
    wait_for(lambda: cluster.state(jobs["theirs"]) == "RUNNING", "all jobs")
    assert cluster.wait_for_state(jobs["short"], "COMPLETED", "FAILED") == "COMPLETED"
    wait_for(lambda: "/tmp/short" not in machine.mounts(), "the epilog")
    for name in ("long", "theirs"):
        assert cluster.wait_for_state(jobs[name], "COMPLETED", "FAILED") == "COMPLETED"
        assert re.search(r"\b30$", listed(cluster, f"{hdfs_url}-{name}"), re.M)
    assert_clean(cluster)
    assert said(cluster, "n1") == []


def test_caches_of_all_users_are_kept_below_the_nodes_limit(cluster: SlurmCluster) -> None:
    """The least recently used ones are removed; symbolic links of users are not followed."""
    machine = cluster.machines["n1"]
    settings = machine.path("/etc/bootseer/slurm.conf")
    before = settings.read_text()
    write_layout(cluster.home / "image", [[Member("content", data=os.urandom(1 << 20))]])
    caches = "/var/cache/bootseer"
    fetch = script("bootseer image fetch oci:/home/image")
    for user in ("alice", "bob"):
        job = cluster.submit("-wn1", "-o", "fetch.out", user=user, script=fetch)
        assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()
    cluster.wait_for_idle()
    planted = [f"{caches}/bootseer-0", f"{caches}/bootseer-1 -rf", f"{caches}/bootseer-2101;id"]
    for path in planted:
        machine.run("mkdir", path, user="bob")

    def kept() -> dict[str, int]:
        shown = machine.run("du", "-sk", *(f"{caches}/bootseer-{uid}" for uid in USERS.values()))
        rows = [line.split() for line in shown.stdout.splitlines()]
        return {path.rpartition("-")[2]: int(size) for size, path in rows}

    assert min(kept().values()) > 1000
    settings.write_text(f"{before}CACHE_DIR={caches} CACHE_LIMIT=0\n")
    try:
        job = cluster.submit("-wn1", "-o", "/dev/null", script=script("true"))
        cluster.wait_for_state(job, "COMPLETED")
        cluster.wait_for_idle()
    finally:
        settings.write_text(before)
    assert max(kept().values()) < 500, kept()
    assert said(cluster, "n1") == []
