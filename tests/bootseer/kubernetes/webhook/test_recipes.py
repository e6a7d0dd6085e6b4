"""The recipes: each pod template is `restricted`, has an annotation, and gets what it asks for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.bootseer.kubernetes.webhook.pod_objects import patched, planned
from tests.support.mounts.fuse_mount import REPOSITORY

RECIPES = sorted((REPOSITORY / "docker/kubernetes/recipes").glob("*.yaml"))


def _templates(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            yield node
        for value in node.values():
            yield from _templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from _templates(value)


def test_there_is_one_for_each_owner_that_is_documented() -> None:
    page = (REPOSITORY / "docs/kubernetes-annotations.md").read_text()
    kinds = {document["kind"] for path in RECIPES for document in _documents(path)}
    assert {kind for kind in kinds if kind != "Service" and kind in page} == kinds - {"Service"}
    assert len(RECIPES) == 8


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_pods_get_what_they_ask_for_and_are_restricted(path: Path) -> None:
    templates = [one for document in _documents(path) for one in _templates(document)]
    assert templates
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        assert not planned(pod).warnings
        changed = patched(pod)
        assert changed["spec"]["runtimeClassName"] == "bootseer"
        _check_restricted(changed["spec"])


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def _check_restricted(spec: dict[str, Any]) -> None:
    """The Pod Security Standard, as far as these pods say anything that it is about."""
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] != 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    allowed = {"configMap", "csi", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
    assert all(volume.keys() - {"name"} <= allowed for volume in spec.get("volumes", ()))
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    for container in spec["containers"]:
        limits = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == limits
