"""Whether the chart is gone, as a pod of it asks when it ends."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli import cli
from tests.bootseer.kubernetes.webhook.api_servers import NAME, NAMESPACE, ApiServer, real
from tests.docs.test_chart import manifests

DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"


def test_lines_are_taken_out_only_when_the_daemonset_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the chart's own DaemonSet and rights, on an API server."""
    with real(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("bootseer.kubernetes.api.ACCOUNT", server.account)
        server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        server.ask("POST", DAEMONSETS, part_of_chart("DaemonSet"))
        # Its rights went first.
        assert goes_on()
        grant(server)
        assert not goes_on()
        server.ask("DELETE", f"{DAEMONSETS}/bootseer-node")
        assert goes_on()
    # Nobody says so: the configuration stays.
    assert not goes_on()


def part_of_chart(kind: str) -> dict[str, Any]:
    (found,) = [
        one
        for one in manifests()
        if one["kind"] == kind and one["metadata"]["name"] == "bootseer-node"
    ]
    return found


def grant(server: ApiServer) -> None:
    server.ask("POST", f"{ROLES}/roles", part_of_chart("Role"))
    subject = {"kind": "User", "name": f"system:serviceaccount:{NAMESPACE}:{NAME}"}
    binding = {**part_of_chart("RoleBinding"), "subjects": [subject]}
    server.ask("POST", f"{ROLES}/rolebindings", binding)


def goes_on() -> bool:
    """Whether it goes on to look for a containerd, which is not here."""
    words = ["kubernetes", "containerd", "remove", "--socket", "/nonexistent/containerd.sock"]
    words += ["--unless-daemonset", f"{NAMESPACE}/bootseer-node"]
    done = CliRunner().invoke(cli, words)
    return "no containerd answers" in str(done.exception)
