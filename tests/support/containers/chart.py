"""The Helm chart, rendered: by `render.go`, since no `helm` can be had everywhere.

`python -m tests.support.containers.chart` writes the plain manifests anew from it (`make docs`).
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from bench.containers.packages import Packages
from bench.model import SkippedError
from tests.clusters.kubernetes.bed.programs import kept_go
from tests.support.mounts.fuse_mount import REPOSITORY

CHART = REPOSITORY / "docker" / "kubernetes" / "chart"
MANIFESTS = REPOSITORY / "docker" / "kubernetes" / "manifests"
NAMESPACE = "bootseer-system"
NEWER_APIS = ("policy/v1/PodDisruptionBudget",)
"""What Kubernetes has since 1.21, and Helm asks a cluster for."""
_SOURCE = Path(__file__).with_name("render.go")
_KEPT = REPOSITORY / ".venv" / "packages"
_LIBRARIES = ("golang-github-masterminds-sprig-dev", "golang-github-ghodss-yaml-dev")
_HEAD = "# Made from docker/kubernetes/chart by `make docs`: change that.\n"
# The dashboard is a file beside the chart.
_PLAIN = {"createNamespace": True, "metrics": {"dashboard": False}}
_DEADLINE_S = 300.0


def render(
    values: Mapping[str, Any] | None = None,
    *,
    apis: Sequence[str] = NEWER_APIS,
    namespace: str = NAMESPACE,
    service: str = "Helm",
) -> dict[str, str]:
    """The text of each template, by its name, as `helm template` would make it.

    Raises: SkippedError where the renderer cannot be built; ValueError where the chart refuses.
    """
    asked = {
        "chart": str(CHART),
        "values": dict(values or {}),
        "release": {"Name": "bootseer", "Namespace": namespace, "Service": service},
        "apis": list(apis),
    }
    done = subprocess.run(
        [_renderer()], input=json.dumps(asked), capture_output=True, text=True, timeout=_DEADLINE_S
    )
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    found: dict[str, str] = json.loads(done.stdout)
    return found


def objects(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The objects of rendered templates or manifests."""
    found = [one for text in texts.values() for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]


def plain_manifests() -> dict[str, str]:
    """The files of docker/kubernetes/manifests. Raises: SkippedError."""
    texts = render(_PLAIN, service="kubectl")
    files = {name: _HEAD + text.lstrip("\n") for name, text in texts.items() if text.strip()}
    listed = "".join(f"  - {name}\n" for name in sorted(files))
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
    return {**files, "kustomization.yaml": f"{_HEAD}{head}{listed}"}


def _renderer() -> Path:
    """The renderer, built once. Raises: SkippedError."""
    go, kept = shutil.which("go"), kept_go()
    if go is None and kept is None:
        raise SkippedError(
            "the chart is rendered by a program in Go, which is not installed: of 450 MB, and "
            "only `make test-kubernetes` fetches it, once for all tests of this machine"
        )
    program = _KEPT / f"render-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        path = Packages(_KEPT).unpacked_with_needs("bookworm", *_LIBRARIES)
        environment = {
            "GOPATH": str(path / "usr/share/gocode"),
            "GOCACHE": str(_KEPT / "go-cache"),
            "GO111MODULE": "off",
            "GOFLAGS": "",
            **({} if go else {"GOROOT": str(kept)}),
        }
        partial = program.with_suffix(".partial")
        done = subprocess.run(
            [go or f"{kept}/bin/go", "build", "-o", str(partial), str(_SOURCE)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        if done.returncode != 0:
            raise SkippedError(f"cannot build the chart's renderer: {done.stderr.strip()}")
        partial.rename(program)
    return program


def main() -> None:
    """Write the plain manifests."""
    shutil.rmtree(MANIFESTS, ignore_errors=True)
    MANIFESTS.mkdir()
    for name, text in plain_manifests().items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
