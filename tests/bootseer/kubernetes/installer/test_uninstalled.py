"""A pod that ends finds out whether its chart was removed."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import PermissionDeniedError
from bootseer.kubernetes import mount_host
from bootseer.kubernetes.csi.attributes import ImageVolume
from bootseer.kubernetes.csi.driver import VolumeRecord, VolumeRecords
from testbed.containers.chart import objects, render
from testbed.waiting import pause
from tests.bootseer.kubernetes.webhook.api_servers import NAME, NAMESPACE, ApiServer, real

DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
ROLES = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"


@contextmanager
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Yield an API server with the chart's DaemonSet; this process asks it as a pod would."""
    with real(tmp_path) as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(mount_host, "ACCOUNT", server.account)
        server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        server.ask("POST", DAEMONSETS, part_of_chart("DaemonSet"))
        yield server


def test_lines_are_taken_out_only_when_the_daemonset_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has the chart's own DaemonSet and rights."""
    with asked(tmp_path, monkeypatch) as server:
        # Its rights went first.
        with monkeypatch.context() as patch:
            patch.setattr(mount_host, "PATIENCE_S", 0.0)
            assert goes_on()
        grant(server)
        assert not goes_on()
        server.ask("DELETE", f"{DAEMONSETS}/bootseer-node")
        assert goes_on()
    # Nobody says so: the configuration stays.
    monkeypatch.setattr(mount_host, "PATIENCE_S", 0.0)
    assert not goes_on()


def test_an_api_server_that_is_late_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While everything is removed, each node gets only one answer."""
    with real(tmp_path) as server:
        monkeypatch.setattr(mount_host, "ACCOUNT", server.account)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server.environ["KUBERNETES_SERVICE_HOST"])
        with socket.create_server(("localhost", 0)) as refuses:
            port = refuses.getsockname()[1]
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))

        def sleep(_seconds: float) -> None:
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))

        monkeypatch.setattr(
            mount_host, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        )
        assert mount_host.is_removed(f"{NAMESPACE}/bootseer-node")


def test_a_refusal_that_passes_is_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's authorisation may fail for a moment while this pod is replaced."""
    with asked(tmp_path, monkeypatch) as server:
        sleeps: list[float] = []

        def sleep(seconds: float) -> None:
            sleeps.append(seconds)
            if len(sleeps) == 1:
                grant(server)
            pause(0.01)

        monkeypatch.setattr(
            mount_host, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        )
        assert not mount_host.is_removed(f"{NAMESPACE}/bootseer-node")
        assert sleeps


def test_an_end_is_within_the_pod_s_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end comes in time although the API server refuses for ever."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Refuses:
        def __init__(self, _account: Path) -> None: ...

        def get(self, _path: str) -> None:
            raise PermissionDeniedError("refused")

    monkeypatch.setattr(mount_host, "Api", Refuses)
    monkeypatch.setattr(mount_host, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    assert mount_host.await_removal("a/b", "volumes", lambda: True, 45.0)
    assert mount_host.PATIENCE_S < now_s < 46.0
    pod = part_of_chart("DaemonSet")["spec"]["template"]["spec"]
    # containerd is restarted afterwards.
    assert now_s + 30 < pod["terminationGracePeriodSeconds"]


def part_of_chart(kind: str) -> dict[str, Any]:
    (found,) = [
        one
        for one in objects(render())
        if one["kind"] == kind and one["metadata"]["name"] == "bootseer-node"
    ]
    return found


def grant(server: ApiServer) -> None:
    server.ask("POST", f"{ROLES}/roles", part_of_chart("Role"))
    subject = {"kind": "User", "name": f"system:serviceaccount:{NAMESPACE}:{NAME}"}
    binding = {**part_of_chart("RoleBinding"), "subjects": [subject]}
    server.ask("POST", f"{ROLES}/rolebindings", binding)


def goes_on() -> bool:
    """Return whether the installer continues to look for a containerd, which is not here."""
    words = ["kubernetes", "containerd", "remove", "--socket", "/nonexistent/containerd.sock"]
    words += ["--unless-daemonset", f"{NAMESPACE}/bootseer-node"]
    done = CliRunner().invoke(cli, words)
    return "no containerd answers" in str(done.exception)


def test_a_driver_that_is_removed_waits_for_the_end_of_its_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet could not unpublish them without the driver."""
    monkeypatch.setenv("BOOTSEER_RUN_DIR", str(tmp_path / "run"))
    waits = Event()

    def sleep(_seconds: float) -> None:
        waits.set()
        pause(0.01)

    monkeypatch.setattr(mount_host, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    records = VolumeRecords(tmp_path / "run/volumes")
    records.write(VolumeRecord("a", "/kubelet/a", ImageVolume("app:1"), True))
    words = ["kubernetes", "csi", "--until-unused", "1h"]
    with ThreadPoolExecutor(1) as pool:
        # One that is only replaced ends at once.
        monkeypatch.setattr(mount_host, "is_removed", lambda name: False)
        done = pool.submit(CliRunner().invoke, cli, [*words, "--unless-daemonset", "a/b"])
        assert done.result(60).exit_code == 0
        assert not waits.is_set()
        waiting = pool.submit(CliRunner().invoke, cli, words)
        assert waits.wait(60)
        assert not waiting.done()
        records.remove("/kubelet/a")
        assert waiting.result(60).exit_code == 0


def test_a_removal_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    assert mount_host.await_removal(None, "volumes", lambda: True, 0.01)
    assert "volumes are still there" in caplog.text
