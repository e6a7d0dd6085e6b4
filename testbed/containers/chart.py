"""The Helm chart, rendered by `helm template`."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from testbed.containers.helm import HELM_4, helm
from testbed.paths import REPOSITORY

CHART = REPOSITORY / "docker" / "kubernetes" / "chart"
NAMESPACE = "bootseer-system"
_SOURCE = re.compile(r"^---\n# Source: bootseer/templates/(\S+)\n", re.MULTILINE)


def render(
    values: Mapping[str, Any] | None = None, *, kubernetes: str = "", version: str = HELM_4
) -> dict[str, str]:
    """Return the text of each template by its name, rendered for a version of Kubernetes.

    `kubernetes` is by default the version that Helm assumes. Raises: MissingError where there is no
    Helm; ValueError with Helm's message if it refuses the values.
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
    """Return the objects of rendered templates."""
    found = [one for text in texts.values() for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]
