"""Fixtures of the tests on a Slurm."""

import sys
from collections.abc import Iterator

import pytest

from tests.clusters.slurm.cluster import SlurmCluster, running_cluster
from tests.clusters.slurm.pages import block
from tests.hdfs.cluster import MiniHdfs
from tests.support.named_tests import REPOSITORY


@pytest.fixture(scope="module")
def cluster(hdfs: MiniHdfs) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes with Bootseer, as docs/slurm.md installs it, and a store on an HDFS."""
    settings = block("slurm.md", "toml", "run_dir").replace("hdfs://namenode:8020", hdfs.url)
    script = (REPOSITORY / "docker/slurm/bootseer").read_text()
    scripts = {f"slurm/{kind}.d/bootseer": script for kind in ("prolog", "epilog")}
    oci = (REPOSITORY / "docker/slurm/oci.conf").read_text()
    scripts["slurm/oci.conf"] = oci.replace("/usr/local/bin", "/etc/slurm")
    scripts["slurm/bootseer-oci"] = (REPOSITORY / "docker/slurm/bootseer-oci").read_text()
    program = f"BOOTSEER={sys.executable.rpartition('/')[0]}/bootseer\nDEADLINE=20\n"
    files = {"bootseer/bootseer.toml": settings, "bootseer/slurm.conf": program, **scripts}
    with running_cluster(configuration=block("slurm.md", "ini", "Prolog="), files=files) as running:
        for name in running.nodes:
            made = running.machines[name].run(
                "install", "-d", "-m", "1777", "/var/cache/bootseer", "/run/bootseer"
            )
            assert made.returncode == 0, made.stderr
        yield running
