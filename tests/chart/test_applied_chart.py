"""A real API server accepts each field of each object of the chart."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from testbed.containers.chart import CHART
from testbed.kubernetes.programs import KEPT, VERSION, cache_folder
from tests.bootseer.kubernetes.webhook.api_servers import NAMESPACE, ApiServer, real
from tests.chart.test_chart import EVERYTHING, LEAST, rendered

KUBECTL = cache_folder() / KEPT / "kubectl"


def test_an_api_server_takes_every_object(tmp_path: Path) -> None:
    """kubectl compares them with the server's schema, and the server validates them."""
    with real(tmp_path) as server:
        server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for values in ({}, EVERYTHING, LEAST):
            found = rendered(values, kubernetes=VERSION)
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
            assert kubectl(server, tmp_path, text).count("(server dry run)") == len(found)
        with pytest.raises(AssertionError, match="privilege"):
            kubectl(server, tmp_path, text.replace('"privileged"', '"privilege"'))
        # This server is older than the version in the URL.
        text = (CHART.parent / "warm-cronjob.yaml").read_text()
        text = text.replace("apiVersion: batch/v1\n", "apiVersion: batch/v1beta1\n")
        assert "created" in kubectl(server, tmp_path, text)


def kubectl(server: ApiServer, folder: Path, text: str, *words: str) -> str:
    command = [str(KUBECTL), f"--server=https://localhost:{server.port}", "--token=admin-token"]
    command += [f"--certificate-authority={folder / 'ca.pem'}"]
    done = subprocess.run(
        [*command, *(words or ("apply", "--dry-run=server", "--filename", "-"))],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "KUBECONFIG": "/dev/null", "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
