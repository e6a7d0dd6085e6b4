"""Fixtures of the tests on a Slurm."""

from collections.abc import Iterator

import pytest

from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.running import running as running_hdfs
from testbed.paths import REPOSITORY
from testbed.slurm.cluster import SlurmCluster, running_cluster
from testbed.slurm.pages import page_block, prolog_files


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """Slurm of two nodes with the settings of docs/slurm.md."""
    files = prolog_files()
    oci = (REPOSITORY / "docker/slurm/oci.conf").read_text()
    files["slurm/oci.conf"] = oci.replace("/usr/local/bin", "/etc/slurm")
    files["slurm/bootseer-oci"] = (REPOSITORY / "docker/slurm/bootseer-oci").read_text()
    with running_cluster(
        configuration=page_block("slurm.md", "ini", "Prolog="), files=files
    ) as running:
        yield running


@pytest.fixture(scope="module")
def hdfs(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    """HDFS on the network of the cluster."""
    controller = slurm.controller
    servers = MiniHdfs(
        tmp_path_factory.mktemp("hdfs"),
        address=controller.address,
        launcher=controller.network_command(),
    )
    with running_hdfs(servers) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(slurm: SlurmCluster, hdfs: MiniHdfs) -> SlurmCluster:
    """Slurm of two nodes with Bootseer, as docs/slurm.md installs it, and a store on an HDFS."""
    settings = page_block("slurm.md", "toml", "run_dir").replace("hdfs://namenode:8020", hdfs.url)
    for etc in (slurm.etc, *(machine.path("/etc") for machine in slurm.machines.values())):
        (etc / "bootseer/bootseer.toml").write_text(settings)
    return slurm
