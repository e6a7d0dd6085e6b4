"""Fixtures: the cluster that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.images import bootseer_image, shell_image, trainer_image
from testbed.kubernetes.installation import Installation


@pytest.fixture(scope="session")
def cluster() -> Iterator[KubernetesCluster]:
    """Two nodes with only Kubernetes on them; tests remove their own objects."""
    running = KubernetesCluster()
    with running:
        yield running


@pytest.fixture(scope="session")
def shell(cluster: KubernetesCluster) -> str:
    """Small image with a shell."""
    return cluster.push(shell_image(), "shell:1")


@pytest.fixture(scope="session")
def trainer(cluster: KubernetesCluster) -> str:
    """Image with torch and without Bootseer."""
    return cluster.push(trainer_image(print), "team/trainer:1")


@pytest.fixture(scope="session")
def installed(cluster: KubernetesCluster) -> Installation:
    """Bootseer installed by its chart, from the image of this checkout."""
    image = cluster.push(bootseer_image(), "bootseer-node:test")
    installation = Installation(cluster, image)
    installation.apply()
    return installation


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the cluster's logs to the report of a failed test."""
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, KubernetesCluster):  # type: ignore[attr-defined]
        report.sections.append(("cluster", running.logs()))  # type: ignore[attr-defined]
    return report
