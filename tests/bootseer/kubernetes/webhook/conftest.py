"""API servers, and replicas of the webhook beside them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bootseer.kubernetes.webhook.api_servers import ApiServer, real, stand_in


@pytest.fixture(params=[stand_in, real], ids=["stand-in", "real"])
def api_server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ApiServer]:
    """Yield an API server with the webhook's objects; this process has its service account."""
    with request.param(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server
