"""Jobs with a private /tmp (job_container/tmpfs), as on many sites."""

from collections.abc import Iterator

import pytest

from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.pages import SHARED, simple_cluster
from testbed.waiting import wait_for
from tests.clusters.slurm.test_faults import SRUN, assert_clean, script

pytestmark = pytest.mark.needs("mount", "fuse")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Slurm that gives each job a private /tmp and /dev/shm after its prolog."""
    lines = "JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n"
    files = {"slurm/job_container.conf": "AutoBasePath=true\nBasePath=/var/lib/own\n"}
    with simple_cluster(files, lines) as running:
        yield running


def _run(directory: str) -> str:
    return f"{SRUN} bootseer run --checkpoint file://{SHARED}/ckpt:{directory} --"


def _end(cluster: SlurmCluster, job: int) -> None:
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", cluster.logs()


def _saved(cluster: SlurmCluster) -> str:
    return cluster.run("bootseer", "checkpoint", "ls", f"file://{SHARED}/ckpt", user="alice")


@pytest.mark.parametrize("directory", ["/tmp/ckpt", "/var/tmp/ckpt"])
@pytest.mark.parametrize("asks", [True, False], ids=["standby", "alone"])
def test_each_step_of_a_job_sees_its_checkpoints(
    cluster: SlurmCluster, directory: str, asks: bool
) -> None:
    """Also if the prolog has mounted them on a folder that the job does not see."""
    cluster.run("sh", "-c", f"rm -rf {SHARED}/ckpt")
    comment = f"bootseer standby --checkpoint file://{SHARED}/ckpt:{directory}" if asks else ""
    text = script(
        f"mountpoint -q {directory} && echo there before",
        f"{_run(directory)} sh -c 'echo mine > {directory}/mine'",
        f"{_run(directory)} cat {directory}/mine",
    )
    words = ("-wn1", "-n1", "-o", "own.out", f"--comment={comment}")
    _end(cluster, cluster.submit(*words, script=text))
    said = (cluster.home / "alice/own.out").read_text().splitlines()
    assert said[-1] == "mine"
    assert ("there before" in said) == (asks and directory != "/tmp/ckpt")
    assert "mine" in _saved(cluster)
    assert_clean(cluster)


def test_jobs_of_a_user_mount_on_folders_of_one_name(cluster: SlurmCluster) -> None:
    """The end of one job leaves the other one's mount."""
    cluster.run("sh", "-c", f"rm -rf {SHARED}/ckpt /home/alice/may-end-*")
    jobs = {}
    for name in ("first", "second"):
        wait = f"while [ ! -e /home/alice/may-end-{name} ]; do sleep 0.2; done"
        save = f"echo a > /tmp/ckpt/{name}-begins; {wait}; echo a > /tmp/ckpt/{name}-ends"
        text = script(f"{_run('/tmp/ckpt')} sh -c '{save}'")
        jobs[name] = cluster.submit("-wn1", "-n1", "-o", f"{name}.out", script=text)
    for name, job in jobs.items():
        wait_for(lambda name=name: f"{name}-begins" in _saved(cluster), name)  # type: ignore[misc]
        assert cluster.state(job) == "RUNNING"
    for name, job in jobs.items():
        (cluster.home / f"alice/may-end-{name}").touch()
        _end(cluster, job)
        assert f"{name}-ends" in _saved(cluster)
    assert_clean(cluster)
