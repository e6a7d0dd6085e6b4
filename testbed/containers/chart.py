"""The Helm chart, rendered by `helm template`, and the plain manifests that are made of it.

`python -m testbed.containers.chart` writes these anew (`make docs`).
"""

import functools
import json
import re
import shutil
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from testbed.containers.helm import HELM_4, helm
from testbed.paths import REPOSITORY

CHART = REPOSITORY / "docker" / "kubernetes" / "chart"
MANIFESTS = REPOSITORY / "docker" / "kubernetes" / "manifests"
NAMESPACE = "bootseer-system"
_HEAD = "# Made from docker/kubernetes/chart by `make docs`: change that.\n"
# The dashboard is a file beside the chart.
_PLAIN = {"metrics": {"dashboard": False}}
# Helm makes it before it looks into a chart.
_NAMESPACE = f"""apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels:
    # Mounts and containerd's configuration need privileges; what jobs get does not.
    pod-security.kubernetes.io/enforce: privileged
    bootseer.io/webhook: "off"
---
"""
_SOURCE = re.compile(r"^---\n# Source: bootseer/templates/(\S+)\n", re.MULTILINE)


def render(
    values: Mapping[str, Any] | None = None, *, kubernetes: str = "", version: str = HELM_4
) -> dict[str, str]:
    """The text of each template, by its name, for a version of Kubernetes (Helm's default).

    Raises: MissingError where there is no Helm; ValueError with its words where it refuses.
    """
    text = _rendered(json.dumps(values or {}), kubernetes, version)
    _, *parts = _SOURCE.split(text)
    found: dict[str, str] = {}
    for name, document in zip(parts[::2], parts[1::2], strict=True):
        before = f"{found[name]}---\n" if name in found else ""
        found[name] = f"{before}{document.strip()}\n"
    return found


@functools.cache
def _rendered(values: str, kubernetes: str, version: str) -> str:
    options = [f"--kube-version={kubernetes}"] if kubernetes else []
    where = ("bootseer", CHART, "--namespace", NAMESPACE, "--values", "-")
    return helm("template", *where, *options, version=version, text=values)


def objects(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The objects of rendered templates or manifests."""
    found = [one for text in texts.values() for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]


def plain_manifests() -> dict[str, str]:
    """The files of docker/kubernetes/manifests. Raises: MissingError."""
    texts = render(_PLAIN)
    texts["config.yaml"] = _NAMESPACE + texts["config.yaml"]
    files = {
        name: _HEAD + text.replace("managed-by: Helm\n", "managed-by: kubectl\n")
        for name, text in texts.items()
    }
    listed = "".join(f"  - {name}\n" for name in sorted(files))
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
    return {**files, "kustomization.yaml": f"{_HEAD}{head}{listed}"}


def main() -> None:
    """Write the plain manifests."""
    files = plain_manifests()
    shutil.rmtree(MANIFESTS, ignore_errors=True)
    MANIFESTS.mkdir()
    for name, text in files.items():
        (MANIFESTS / name).write_text(text)


if __name__ == "__main__":
    main()
