"""The cluster that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from bench.model import SkippedError
from tests.clusters.kubernetes.bed.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes with nothing on them but Kubernetes; a test removes what it applied."""
    try:
        running = Cluster()
    except SkippedError as reason:
        pytest.skip(f"no Kubernetes here: {reason}")
    with running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The logs of the cluster go with a test that failed."""
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, Cluster):  # type: ignore[attr-defined]
        report.sections.append(("cluster", running.logs()))  # type: ignore[attr-defined]
    return report
