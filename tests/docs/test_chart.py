"""The Helm chart and the plain manifests: one truth, names that fit, no rights beyond the table."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bench.model import SkippedError
from tests.support.containers.chart import CHART, MANIFESTS, objects, plain_manifests, render

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
EVERYTHING = {
    "createNamespace": True,
    "image": {"tag": "v7"},
    "imagePullSecrets": ["login"],
    "settings": {"store": "s3://bucket/bootseer", "cache_limit": "200GB"},
    "storeSecret": "store",
    "extraEnv": [{"name": "HADOOP_CONF_DIR", "value": "/etc/hadoop"}],
    "extraVolumes": [{"name": "hadoop", "configMap": {"name": "hadoop"}}],
    "extraVolumeMounts": [{"name": "hadoop", "mountPath": "/etc/hadoop"}],
    "nodeSelector": {"gpu": "yes"},
    "containerd": {"restartCommand": "systemctl restart k3s"},
    "csi": {"sources": ["s3://bucket/checkpoints"]},
    "warm": {"images": ["registry://registry.example.com/team/trainer:v7"]},
    "metrics": {"directory": "/var/lib/node_exporter"},
}
Object = dict[str, Any]


def manifests() -> list[Object]:
    return objects({path.name: path.read_text() for path in MANIFESTS.iterdir()})


def rendered(values: Object, **changes: Any) -> list[Object]:
    try:
        return objects(render(values, **changes))
    except SkippedError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["manifests", "chart", "chart with everything", "chart with least"])
def installed(request: pytest.FixtureRequest) -> list[Object]:
    if request.param == "manifests":
        return [one for one in manifests() if one["kind"] != "Kustomization"]
    least = {name: {"enabled": False} for name in ("snapshotter", "webhook")}
    values: Object = {
        "chart": {},
        "chart with everything": EVERYTHING,
        "chart with least": {**least, "containerd": {"install": False}},
    }
    return rendered(values[request.param])


def pods(of: list[Object]) -> Iterator[tuple[str, Object]]:
    for one in of:
        if one["kind"] in ("DaemonSet", "Deployment"):
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def test_the_plain_manifests_are_the_chart_s() -> None:
    try:
        texts = plain_manifests()
    except SkippedError as error:
        pytest.skip(str(error))
    assert {path.name: path.read_text() for path in MANIFESTS.iterdir()} == texts, "run `make docs`"


def test_names_fit_together(installed: list[Object]) -> None:
    """Selectors, accounts, roles and volumes name what there is."""
    keys = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"])
        for one in installed
    ]
    assert len(set(keys)) == len(keys)
    labels = [pod["metadata"]["labels"] for _, pod in pods(installed)]
    for one in installed:
        spec = one.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= have.items() for have in labels) == 1, one["metadata"]
        for subject in one.get("subjects", ()):
            assert (subject["kind"], subject["namespace"], subject["name"]) in keys
        if "roleRef" in one:
            kind, name = one["roleRef"]["kind"], one["roleRef"]["name"]
            namespace = one["metadata"].get("namespace")
            assert (kind, namespace, name) in keys
    for _, pod in pods(installed):
        account = pod["spec"].get("serviceAccountName")
        assert account is None or ("ServiceAccount", "bootseer-system", account) in keys
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        used = {m["name"] for one in containers(pod) for m in one.get("volumeMounts", ())}
        assert used == set(volumes)
        for name in ("configMap", "secret"):
            ours = [one[name]["name"] for one in volumes.values() if name in one]
            known = {key[2] for key in keys if key[0] in ("ConfigMap", "Secret")} | {"hadoop"}
            assert set(ours) <= known


def test_folders_of_the_node_are_where_they_are_on_the_node(installed: list[Object]) -> None:
    """containerd and the kubelet are told paths of these containers."""
    for _, pod in pods(installed):
        hosts = {
            volume["name"]: volume["hostPath"]["path"]
            for volume in pod["spec"].get("volumes", ())
            if "hostPath" in volume
        }
        for one in containers(pod):
            for mount in one.get("volumeMounts", ()):
                if mount["name"] in hosts:
                    assert mount["mountPath"] == hosts[mount["name"]]


def test_whoever_mounts_for_the_node_is_restarted_without_a_loss(installed: list[Object]) -> None:
    by_name = {one["metadata"]["name"]: one for one in installed if one["kind"] == "DaemonSet"}
    mounts = by_name["bootseer-mounts"]
    assert mounts["spec"]["updateStrategy"] == {"type": "OnDelete"}
    pod = mounts["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "system-node-critical"
    grace = [word for word in pod["containers"][0]["command"] if word.startswith("--grace=")]
    assert int(grace[0].partition("=")[2]) < pod["terminationGracePeriodSeconds"]
    address = f"--address={DEFAULTS['runDir']}/spawner.sock"
    assert address in pod["containers"][0]["command"]
    others = by_name["bootseer-node"]["spec"]["template"]["spec"]
    for one in others["containers"]:
        spawner = {"name": "BOOTSEER_SPAWNER", "value": address.partition("=")[2]}
        assert spawner in one["env"]


def test_the_webhook_is_never_in_the_way(installed: list[Object]) -> None:
    for one in installed:
        for hook in one.get("webhooks", ()):
            assert hook["failurePolicy"] == "Ignore"
            assert hook["timeoutSeconds"] <= 5
            # Our own pods start without it.
            (ours,) = [
                expression["values"]
                for expression in hook["objectSelector"]["matchExpressions"]
                if expression["key"] == "app.kubernetes.io/name"
            ]
            assert ours == ["bootseer"]


def test_older_clusters_get_what_they_know() -> None:
    found = rendered({}, apis=())
    (budget,) = [one for one in found if one["kind"] == "PodDisruptionBudget"]
    assert budget["apiVersion"] == "policy/v1beta1"


def test_every_value_is_documented_used_and_checked() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(SCHEMA["properties"]) == set(DEFAULTS)
    for name, value in DEFAULTS.items():
        inner = SCHEMA["properties"][name].get("properties")
        if isinstance(value, dict) and inner is not None and name != "settings":
            assert set(inner) == set(value), name
            assert not SCHEMA["properties"][name]["additionalProperties"]
            for key in value:
                assert f".Values.{name}.{key}" in templates, f"{name}.{key}"
        else:
            assert f".Values.{name}" in templates, name
    assert not SCHEMA["additionalProperties"]
    unknown = set(re.findall(r"\.Values\.(\w+)", templates)) - set(DEFAULTS)
    assert not unknown
