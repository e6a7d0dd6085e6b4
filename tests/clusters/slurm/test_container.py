"""`srun --container` with docker/slurm/oci.conf: runc over an image that Bootseer serves."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.images.building import run_tool
from testbed.images.rootfs import python_root
from testbed.needs import MissingError
from testbed.slurm.cluster import SlurmCluster
from testbed.slurm.pages import page_block
from testbed.waiting import wait_for
from tests.clusters.slurm.test_faults import assert_clean, script

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]


@pytest.fixture(scope="module")
def image(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small image with a Python, in a folder that all nodes share."""
    for tool in ("runc", "umoci"):
        if shutil.which(tool) is None:
            raise MissingError(f"needs {tool}")
    work = tmp_path_factory.mktemp("image")
    layout = cluster.home / "image"
    run_tool("umoci", "init", "--layout", layout)
    run_tool("umoci", "new", "--image", f"{layout}:v1")
    run_tool("umoci", "unpack", "--image", f"{layout}:v1", work / "bundle")
    python_root(work / "bundle/rootfs")
    (work / "bundle/rootfs/only-here").write_text("of the image")
    run_tool("umoci", "repack", "--image", f"{layout}:v1", work / "bundle")
    run_tool("chmod", "-R", "a+rX", layout)
    return layout


@pytest.fixture
def bundle(cluster: SlurmCluster, image: Path) -> Iterator[str]:
    """The documented bundle, for alice."""
    text = page_block("slurm.md", "sh", "bootseer-image")
    text = text.replace("registry://registry.example/train:v7", "oci:/home/image:v1")
    done = cluster.controller.run("sh", "-ec", text, user="alice")
    assert done.returncode == 0, done.stderr
    yield "/home/alice/train"
    shutil.rmtree(cluster.home / "alice/train")
    assert_clean(cluster)


SHOW = "print(open('/only-here').read(), __import__('os').environ['SLURM_PROCID'])"


def test_a_step_runs_in_an_image_that_is_served(cluster: SlurmCluster, bundle: str) -> None:
    """On two nodes, for a user without privileges."""
    words = ("srun", "-N2", f"--container={bundle}", "python3", "-c", SHOW)
    done = cluster.controller.run(*words, user="alice", timeout_s=120)
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert sorted(done.stdout.splitlines()) == [f"of the image {rank}" for rank in range(2)]
    # Its exit code is that of the step.
    words = ("srun", "-N1", f"--container={bundle}", "python3", "-c", "raise SystemExit(7)")
    assert cluster.controller.run(*words, user="alice", timeout_s=120).returncode == 7


def test_a_step_in_an_image_is_cancelled(cluster: SlurmCluster, bundle: str) -> None:
    wait = "import time; print('began', flush=True); time.sleep(600)"
    line = f'srun --container={bundle} python3 -c "{wait}"'
    job = cluster.submit("-wn1", "-o", "container.out", script=script(line))
    output = cluster.home / "alice/container.out"
    wait_for(lambda: output.exists() and "began" in output.read_text(), "the container")
    cluster.run("scancel", str(job))
    cluster.wait_for_state(job, "CANCELLED")


def test_an_image_that_cannot_be_had_leaves_the_bundles_own_root(
    cluster: SlurmCluster, bundle: str, image: Path
) -> None:
    folder = cluster.home / "alice/train"
    (folder / "bootseer-image").write_text("oci:/home/nothing:v1\n")
    words = ("srun", "-N1", f"--container={bundle}", "python3", "-c", SHOW)
    done = cluster.controller.run(*words, user="alice", timeout_s=120)
    assert done.returncode != 0
    assert "/home/nothing" in done.stderr
    python_root(folder / "rootfs")
    (folder / "rootfs/only-here").write_text("of the bundle")
    done = cluster.controller.run(*words, user="alice", timeout_s=120)
    assert done.stdout.splitlines() == ["of the bundle 0"], done.stderr
