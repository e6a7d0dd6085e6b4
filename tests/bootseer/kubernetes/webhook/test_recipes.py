"""Each pod template of the recipes is `restricted`, has an annotation, and gets its volumes."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bootseer.fanout.membership import StartFacts, find_members, port_of
from testbed.paths import REPOSITORY
from tests.bootseer.kubernetes.webhook.pod_objects import patched, planned, pod_object
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
    assert len(RECIPES) == 9


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_pods_get_what_they_ask_for_and_are_restricted(path: Path) -> None:
    templates = [one for document in _documents(path) for one in _templates(document)]
    assert templates
    for template in templates:
        asked = template["metadata"]
        labels = {"controller-uid": "u-1", "job-name": "train", **asked.get("labels", {})}
        pod = pod_object(asked["annotations"], labels, **template["spec"])
        assert not planned(pod).warnings
        changed = patched(pod)
        assert changed["spec"]["runtimeClassName"] == "bootseer"
        assert not violations(changed)
        # The user is named: the image may be root's.
        assert changed["spec"]["securityContext"]["runAsUser"]


def test_pods_of_the_recipe_with_a_fan_out_share_a_key_and_know_each_other() -> None:
    service, job = _documents(REPOSITORY / "docker/kubernetes/recipes/fanout.yaml")
    (template,) = _templates(job)
    count, name = job["spec"]["completions"], job["metadata"]["name"]
    secrets, digests, owns = set(), set(), []
    for number in range(count):
        # As the controllers of Jobs make pods of it.
        pod = pod_object(
            template["metadata"]["annotations"],
            {"controller-uid": "u-1", "job-name": name},
            {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "u-1"},
            **template["spec"],
        )
        (container,) = patched(pod)["spec"]["containers"]
        environ = {one["name"]: one for one in container["env"]}
        secrets.add(environ["BOOTSEER_FANOUT_KEY"]["valueFrom"]["secretKeyRef"]["name"])
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert service["metadata"]["name"] == pod["spec"]["subdomain"]
        start = [environ[f"BOOTSEER_{word}"]["value"] for word in ("JOB", "SUBMISSION")]
        # As kubelets and DNS servers name a pod.
        domain = f"{pod['spec']['subdomain']}.training.svc.cluster.local"
        found = find_members(
            StartFacts(
                environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
                names=(f"{name}-{number}", f"{name}-{number}.{domain}"),
                node="worker-7",
                port=port_of(*start, "0"),
                command=container["command"][container["command"].index("--") + 1 :],
            )
        )
        assert [one.host for one in found.members] == [f"{name}-{n}.{domain}" for n in range(count)]
        owns.append(found.own)
        digests.add(found.digest)
    assert (len(secrets), len(digests), owns) == (1, 1, list(range(count)))


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
    (template,) = _templates(_documents(RECIPES[2])[0])
    assert RECIPES[2].stem == "job"
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
