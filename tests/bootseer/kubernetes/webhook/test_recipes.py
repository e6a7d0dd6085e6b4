"""Each pod template of the recipes is `restricted`, has an annotation, and gets its volumes."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from testbed.paths import REPOSITORY
from tests.bootseer.kubernetes.webhook.pod_objects import patched, planned
from tests.bootseer.kubernetes.webhook.restricted import violations

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
        assert not violations(changed)
        # The user is named: the image may be root's.
        assert changed["spec"]["securityContext"]["runAsUser"]


def test_the_guides_pod_in_a_restricted_namespace_is_allowed_there() -> None:
    guide = (REPOSITORY / "docs/kubernetes.md").read_text()
    assert "enforce=restricted" in guide
    applied = re.search(r"apply --namespace training -f - <<'END'\n(.*?)^END$", guide, re.S | re.M)
    assert applied
    (template,) = _templates(yaml.safe_load(applied[1]))
    assert not violations(patched({"apiVersion": "v1", "kind": "Pod", **template}))


WRONG: dict[str, dict[str, Any]] = {
    "hostNetwork": {"hostNetwork": True},
    "hostPID": {"hostPID": True},
    "hostIPC": {"hostIPC": True},
    "volume": {"volumes": [{"name": "data", "hostPath": {"path": "/data"}}]},
    "sysctl": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "pod: runAsUser": {"securityContext": {"runAsUser": 0}},
    "pod: AppArmor": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
    "runAsNonRoot": {"securityContext": {}},
    "a: seccompProfile": {"securityContext": {"runAsNonRoot": True}},
}
WRONG_CONTAINERS: dict[str, dict[str, Any]] = {
    "allowPrivilegeEscalation": {"securityContext": {"capabilities": {"drop": ["ALL"]}}},
    "capabilities are kept": {"securityContext": {"capabilities": {"drop": ["NET_RAW"]}}},
    "capabilities are added": {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
    "privileged": {"securityContext": {"privileged": True}},
    "procMount": {"securityContext": {"procMount": "Unmasked"}},
    "seLinuxOptions": {"securityContext": {"seLinuxOptions": {"type": "spc_t"}}},
    "seccompProfile": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "runAsNonRoot": {"securityContext": {"runAsNonRoot": False}},
    "runAsUser": {"securityContext": {"runAsUser": 0}},
    "hostPort": {"ports": [{"containerPort": 1, "hostPort": 1}]},
    "the host of a probe": {"livenessProbe": {"httpGet": {"port": 1, "host": "10.0.0.1"}}},
    "hostProcess": {"securityContext": {"windowsOptions": {"hostProcess": True}}},
}


def test_what_is_not_restricted_is_seen() -> None:
    """Each rule is violated by itself, in each kind of container."""
    (template,) = _templates(_documents(RECIPES[1])[0])
    assert RECIPES[1].stem == "job"
    pod: dict[str, Any] = {**template, "spec": {**template["spec"]}}
    pod["spec"]["containers"] = [{**pod["spec"]["containers"][0], "name": "a"}]
    assert not violations(pod)
    for rule, spec in WRONG.items():
        found = violations({**pod, "spec": {**pod["spec"], **spec}})
        assert any(rule in one for one in found), (rule, found)
    for rule, change in WRONG_CONTAINERS.items():
        for kind in ("containers", "initContainers", "ephemeralContainers"):
            changed = copy.deepcopy(pod)
            (container,) = copy.deepcopy(pod["spec"]["containers"])
            changed["spec"][kind] = [{**container, "name": "b", **change}]
            assert f"b: {rule}" in violations(changed)


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))
