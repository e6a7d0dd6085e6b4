"""Replicas, Secret and API server agree on a certificate at first, at a renewal, and late."""

import base64
from datetime import UTC, datetime
from typing import Any

import pytest

from bootseer.errors import BusyError, NotFoundError, PermissionDeniedError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.certificate import VALIDITY, Certificate, Pair
from bootseer.kubernetes.webhook.server import ASK_S, ClusterView
from testbed.containers.chart import objects, render
from tests.bootseer.kubernetes.webhook.api_servers import (
    CONFIGURATION,
    NAME,
    NAMESPACE,
    SECRET,
    ApiServer,
)


class _Replica:
    """Replica of the webhook, and the certificate it serves with."""

    def __init__(self, server: ApiServer) -> None:
        self.api = Api(server.account)
        self.now = datetime.now(UTC)
        self.used: list[Pair] = []
        self.certificate = Certificate(
            self.api,
            namespace=NAMESPACE,
            name=NAME,
            use=self.used.append,
            clock=lambda: self.now,
        )

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.certificate.refresh()


def _bundle(pair: Pair) -> str:
    return base64.b64encode(pair.trusted).decode()


def test_replicas_serve_with_one_pair_that_the_api_server_believes(api_server: ApiServer) -> None:
    api_server.install()
    one, other = _Replica(api_server), _Replica(api_server)
    one.look()
    other.look()
    assert one.used == other.used
    assert len(one.used) == 1
    assert api_server.bundle() == _bundle(one.used[0])
    assert one.certificate.is_ready
    one.look()
    versions = _versions(api_server)
    one.look(3)
    # Nothing is written where nothing changes.
    assert _versions(api_server) == versions
    assert len(one.used) == 1


def test_of_two_that_renew_at_once_one_wins(api_server: ApiServer) -> None:
    """The second has read the Secret before the first writes it."""
    api_server.install()
    one, other = _Replica(api_server), _Replica(api_server)
    read = other.api.get

    def late(path: str) -> dict[str, Any] | None:
        found = read(path)
        if path == SECRET and not one.used:
            one.look()
        return found

    other.api.get = late  # type: ignore[method-assign]
    with pytest.raises(BusyError):
        other.look()
    assert not other.used
    other.look()
    assert other.used == one.used


def test_a_renewed_pair_is_served_after_the_api_server_was_told(api_server: ApiServer) -> None:
    api_server.install()
    one, other = _Replica(api_server), _Replica(api_server)
    one.look()
    other.look()
    one.now += VALIDITY * 0.8
    one.look()
    # Told, and not served yet: another API server may not have noticed.
    assert len(one.used) == 1
    renewed = api_server.bundle()
    assert renewed != _bundle(one.used[0])
    # Who has not noticed is believed, as the bundle has both certificates.
    assert one.used[0].trusted in base64.b64decode(renewed)
    one.look()
    other.look()
    assert one.used[-1] == other.used[-1] != one.used[0]
    assert renewed == _bundle(one.used[-1])


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_what_others_have_changed_is_put_right(
    api_server: ApiServer, places: tuple[int, ...]
) -> None:
    api_server.install()
    replica = _Replica(api_server)
    replica.look()
    found = api_server.ask("GET", CONFIGURATION)
    for place in places:
        found["webhooks"][place]["clientConfig"].pop("caBundle")
    api_server.ask("PUT", CONFIGURATION, found)
    replica.look()
    assert api_server.bundle() == _bundle(replica.used[0])
    secret = api_server.ask("GET", SECRET)
    secret["data"]["tls.key"] = base64.b64encode(b"damaged").decode()
    api_server.ask("PUT", SECRET, secret)
    replica.look(2)
    assert replica.used[1].trusted != replica.used[0].trusted
    assert api_server.bundle() == _bundle(replica.used[1])


def test_what_is_missing_is_named(api_server: ApiServer) -> None:
    replica = _Replica(api_server)
    with pytest.raises((NotFoundError, PermissionDeniedError), match=f"secrets/{NAME}"):
        replica.look()
    api_server.install()
    api_server.ask("DELETE", CONFIGURATION)
    with pytest.raises(NotFoundError, match=r"pods\.bootseer\.io"):
        replica.look()
    assert not replica.certificate.is_ready


def test_the_cluster_is_seen_as_it_is(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.install()
    seconds = 0.0
    monkeypatch.setattr("bootseer.kubernetes.webhook.server.time.monotonic", lambda: seconds)
    view = ClusterView(Api(api_server.account), "hdfs://n/s")
    assert (view().has_driver, view().handler) == (False, "")
    api_server.install_node_parts()
    assert not view().has_driver
    seconds = 10.0
    assert (view().has_driver, view().handler) == (True, "bootseer")
    # Without rights, what was known holds.
    (api_server.account / "token").write_text("nobody's")
    seconds = 20.0
    assert view().has_driver


def test_both_questions_fit_into_the_time_that_the_chart_gives_a_webhook() -> None:
    """The webhook may wait for an API server that is gone, twice."""
    hooks = [hook for one in objects(render()) for hook in one.get("webhooks", ())]
    assert hooks
    assert all(hook["timeoutSeconds"] > 2 * ASK_S for hook in hooks)


def _versions(server: ApiServer) -> list[str]:
    return [
        str(server.ask("GET", path)["metadata"]["resourceVersion"])
        for path in (SECRET, CONFIGURATION)
    ]
