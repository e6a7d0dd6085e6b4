"""The webhook's command as a pod runs it: beside an API server, whose pods it changes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.needs import MissingError
from tests.bootseer.kubernetes.webhook.api_servers import ApiServer, real, stand_in
from tests.bootseer.kubernetes.webhook.pod_objects import pod_object, variables

_PODS = "/api/v1/namespaces/training/pods"
_REPLAY = {"bootseer.io/replay": "auto"}
_CHECKPOINT = {"bootseer.io/checkpoint": "hdfs://namenode/ckpt"}
_REQUIRED = {"bootseer.io/checkpoint": "required"}


@contextlib.contextmanager
def _webhook(server: ApiServer, *, said: str = "serving on port") -> Iterator[tuple[Any, int]]:
    """Yield the process and its port, once API servers trust its certificate."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "bootseer", "kubernetes", "webhook"),
            *("--port", "0", "--account", server.account),
        ],
        env={**os.environ, **server.environ, "BOOTSEER_STORE": "hdfs://namenode/store"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if said in line)
        yield process, int(line.split()[-1]) if said == "serving on port" else 0
    finally:
        if process.poll() is None:
            # Twice: the second one ends it without the seconds for the API servers' sake.
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def _address() -> str:
    """Return an address of this machine; endpoints may have no loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        try:
            plain.connect(("192.0.2.1", 9))
        except OSError:
            raise MissingError("this machine has no address but its loopback's") from None
        return str(plain.getsockname()[0])


def _created(
    server: ApiServer,
    name: str,
    annotations: dict[str, str],
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the pod that the API server made, without the parts that are unique to a pod."""
    document = pod_object(annotations, labels)
    document["metadata"] |= {"name": name}
    pod: dict[str, Any] = server.ask("POST", _PODS, document)
    server.ask("DELETE", f"{_PODS}/{name}?gracePeriodSeconds=0")
    for volatile in ("uid", "creationTimestamp", "resourceVersion", "managedFields", "selfLink"):
        pod["metadata"].pop(volatile, None)
    return pod


def test_it_makes_itself_believed_and_ends_when_told(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server:
        server.install()
        with _webhook(server) as (process, _):
            assert server.bundle()
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert process.returncode == 0


def test_it_waits_for_what_is_missing(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server, _webhook(server, said="make an empty Secret"):
        pass


def test_a_real_api_server_changes_annotated_pods_only(tmp_path: Path) -> None:
    with real(tmp_path) as server:
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "training"}}
        server.ask("POST", "/api/v1/namespaces", space)
        plain_before = _created(server, "plain", {"example.com/a": "b"})
        server.install()
        server.install_node_parts()
        with _webhook(server) as (process, port):
            server.install_service(_address(), port)
            assert _created(server, "plain", {"example.com/a": "b"}) == plain_before
            asked = {**_REPLAY, **_CHECKPOINT, "bootseer.io/environment": "llm"}
            pod = _created(server, "replayed", asked)
            assert pod["spec"]["runtimeClassName"] == "bootseer"
            assert pod["metadata"]["annotations"]["io.containerd.cri.runtime-handler"] == "bootseer"
            assert [one["csi"]["driver"] for one in pod["spec"]["volumes"]] == [
                "csi.bootseer.io",
                "csi.bootseer.io",
            ]
            assert variables(pod)["BOOTSEER_STORE"] == "hdfs://namenode/store"
            pod = _created(server, "required", _CHECKPOINT, _REQUIRED)
            assert [one["name"] for one in pod["spec"]["volumes"]] == ["bootseer-checkpoint"]
            with pytest.raises(AssertionError, match="is not a URL"):
                _created(server, "wrong", {"bootseer.io/checkpoint": "/mnt"}, _REQUIRED)
            process.kill()
            process.wait(60)
            # It is down: pods start the ordinary way, but for those that may not.
            assert "runtimeClassName" not in _created(server, "ordinary", _REPLAY)["spec"]
            assert "volumes" not in _created(server, "unlabelled", _CHECKPOINT)["spec"]
            assert _created(server, "plain", {"example.com/a": "b"}) == plain_before
            with pytest.raises(AssertionError, match=r"checkpoints\.bootseer\.io"):
                _created(server, "required", _CHECKPOINT, _REQUIRED)
