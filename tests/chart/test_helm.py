"""The chart's life by Helm on a real API server: install, upgrade, roll back, uninstall."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testbed.containers.chart import CHART
from testbed.containers.helm import HELM_3, HELM_4, helm, helm_program
from tests.bootseer.kubernetes.webhook.api_servers import (
    CONFIGURATION,
    NAMESPACE,
    SECRET,
    ApiServer,
    real,
)

_KINDS = (
    "/api/v1/configmaps",
    "/api/v1/secrets",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/apps/v1/daemonsets",
    "/apis/apps/v1/deployments",
    "/apis/{policy}/poddisruptionbudgets",
    "/apis/networking.k8s.io/v1/networkpolicies",
    *(
        f"/apis/rbac.authorization.k8s.io/v1/{kind}"
        for kind in ("roles", "rolebindings", "clusterroles", "clusterrolebindings")
    ),
    "/apis/node.k8s.io/v1/runtimeclasses",
    "/apis/storage.k8s.io/v1/csidrivers",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
)
_Helm = Callable[..., str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    helm_program(HELM_3), helm_program(HELM_4)
    with real(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(params=[(HELM_3, HELM_3), (HELM_4, HELM_4), (HELM_3, HELM_4)], ids="-".join)
def helms(request: pytest.FixtureRequest, server: ApiServer) -> Sequence[_Helm]:
    """The Helm that installs, and the Helm that upgrades."""

    def of(version: str) -> _Helm:
        def run(*words: str | Path, **values: Any) -> str:
            given = ("--values", "-") if values else ()
            where = (*server.flags, "--namespace", NAMESPACE)
            return helm(*words, *given, *where, version=version, text=json.dumps(values))

        return run

    return [of(version) for version in request.param]


def names(server: ApiServer) -> set[str]:
    """Return the names of Bootseer's objects, without Helm's and the server's own."""
    policy = server.ask("GET", "/apis/policy")["preferredVersion"]["groupVersion"]
    found = [
        f"{path.rpartition('/')[2]}/{one['metadata']['name']}"
        for path in _KINDS
        for one in server.ask("GET", path.format(policy=policy))["items"]
    ]
    return {
        name for name in found if "bootseer" in name and not name.startswith("secrets/sh.helm.")
    }


def test_what_is_installed_goes_and_what_is_made_there_stays(
    server: ApiServer, helms: Sequence[_Helm]
) -> None:
    install, upgrade = helms
    install("install", "bootseer", CHART, "--create-namespace", settings={"store": "s3://a/b"})
    whole = names(server)
    # As the webhook does.
    pair = {"tls.crt": base64.b64encode(b"made there").decode()}
    server.ask("PUT", SECRET, {**server.ask("GET", SECRET), "data": pair})
    configuration = server.ask("GET", CONFIGURATION)
    for hook in configuration["webhooks"]:
        hook["clientConfig"]["caBundle"] = base64.b64encode(b"authority").decode()
    server.ask("PUT", CONFIGURATION, configuration)
    bundle = server.bundle()
    try:
        off = {"enabled": False}
        words = ("upgrade", "bootseer", CHART, "--reset-then-reuse-values")
        upgrade(*words, snapshotter=off, csi=off, warm={"environments": ["a"]})
        gone = {
            *("daemonsets/bootseer-node", "roles/bootseer-node", "rolebindings/bootseer-node"),
            *("runtimeclasses/bootseer", "csidrivers/csi.bootseer.io"),
        }
        assert names(server) == whole - gone | {"daemonsets/bootseer-warm"}
        assert server.ask("GET", SECRET)["data"] == pair
        assert server.bundle() == bundle
        upgrade("rollback", "bootseer", "1")
        assert names(server) == whole
        assert server.ask("GET", SECRET)["data"] == pair
        assert server.bundle() == bundle
        config = server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/bootseer-config")
        assert 'store = "s3://a/b"' in config["data"]["bootseer.toml"]
    finally:
        upgrade("uninstall", "bootseer")
    assert not names(server)


def test_parts_are_switched_off_and_on(server: ApiServer, helms: Sequence[_Helm]) -> None:
    """A server-side apply removes exactly the objects that are not in the chart any more."""
    install, upgrade = helms
    install("install", "bootseer", CHART, "--create-namespace")
    try:
        whole = names(server)
        off = {"enabled": False}
        for part, gone in (
            ("snapshotter", {"runtimeclasses/bootseer"}),
            ("csi", {"csidrivers/csi.bootseer.io"}),
            ("webhook", {name for name in whole if name.endswith("/bootseer-webhook")}),
        ):
            upgrade("upgrade", "bootseer", CHART, **{part: off})
            assert names(server) == whole - gone
            upgrade("upgrade", "bootseer", CHART, "--reset-values")
            assert names(server) == whole
    finally:
        upgrade("uninstall", "bootseer")
    assert not names(server)


def test_a_newer_chart_brings_its_new_values(
    server: ApiServer, helms: Sequence[_Helm], tmp_path: Path
) -> None:
    """New values are added to the set ones; without them the upgrade is refused."""
    install, upgrade = helms
    older = tmp_path / "chart"
    shutil.copytree(CHART, older)
    text = (older / "values.yaml").read_text()
    # Before there were values for it.
    (older / "values.yaml").write_text(text.partition("# Figures for Prometheus")[0])
    (older / "values.schema.json").unlink()
    for template in ("warm", "config", "mounts", "node"):
        (older / f"templates/{template}.yaml").unlink()
    helpers = older / "templates/_helpers.tpl"
    helpers.write_text(helpers.read_text().replace(".Values.metrics.directory", "false"))
    install("install", "bootseer", older, "--create-namespace", settings={"store": "s3://a/b"})
    try:
        with pytest.raises(ValueError, match=r"missing property 'metrics'|metrics is required"):
            upgrade("upgrade", "bootseer", CHART, "--reuse-values")
        upgrade("upgrade", "bootseer", CHART, "--reset-then-reuse-values")
        config = server.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/bootseer-config")
        assert 'store = "s3://a/b"' in config["data"]["bootseer.toml"]
    finally:
        upgrade("uninstall", "bootseer")
    assert not names(server)
