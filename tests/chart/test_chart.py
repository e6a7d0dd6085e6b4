"""The Helm chart: consistent names, and no rights beyond the table in SECURITY.md."""

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bootseer.kubernetes.webhook.plan import ANNOTATIONS
from testbed.containers.chart import CHART, objects, render
from testbed.containers.helm import HELM_3, HELM_4, helm
from testbed.paths import REPOSITORY

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = {
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
    "webhook": {
        "nodeSelector": {"zone": "1"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "site-critical",
    },
    "warm": {
        "images": ["registry://registry.example.com/team/trainer:v7"],
        "environments": ["train-env"],
    },
    "metrics": {"directory": "/var/lib/node_exporter"},
}
LEAST = {
    "snapshotter": {"enabled": False},
    "webhook": {"enabled": False},
    "containerd": {"install": False},
}
SECURITY = REPOSITORY / "SECURITY.md"
Object = dict[str, Any]


def rendered(values: Object, **changes: Any) -> list[Object]:
    return objects(render(values, **changes))


@pytest.fixture(params=["chart", "chart with everything", "chart with least"])
def installed(request: pytest.FixtureRequest) -> list[Object]:
    values: Object = {
        "chart": {},
        "chart with everything": EVERYTHING,
        "chart with least": LEAST,
    }
    return rendered(values[request.param])


def hooks(kubernetes: str) -> dict[str, Object]:
    kind = "MutatingWebhookConfiguration"
    (found,) = [one for one in rendered({}, kubernetes=kubernetes) if one["kind"] == kind]
    return {hook["name"]: hook for hook in found["webhooks"]}


def test_pods_without_annotations_are_not_sent_where_that_can_be_said() -> None:
    """Match conditions exist since Kubernetes 1.28."""
    known = hooks("1.28.3-gke.100")
    (condition,) = known["pods.bootseer.io"]["matchConditions"]
    names = ", ".join(map(repr, ANNOTATIONS))
    assert f"[{names}].exists( name, name in object" in condition["expression"]
    # A pod whose label requires a folder and that names none is refused.
    assert "matchConditions" not in known["checkpoints.bootseer.io"]
    assert "matchConditions" not in hooks("1.27.9")["pods.bootseer.io"]


def pods(of: list[Object]) -> Iterator[tuple[str, Object]]:
    for one in of:
        if one["kind"] in ("DaemonSet", "Deployment"):
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


@pytest.mark.parametrize("version", [HELM_3, HELM_4])
def test_helm_has_nothing_to_say_of_it(version: str) -> None:
    for values in ({}, EVERYTHING, LEAST):
        words = ("lint", "--strict", CHART, "--values", "-")
        helm(*words, version=version, text=json.dumps(values))


@pytest.mark.parametrize("values", [{}, EVERYTHING, LEAST])
def test_helm_3_and_helm_4_install_the_same(values: Object) -> None:
    one, other = (rendered(values, version=version) for version in (HELM_3, HELM_4))
    assert sorted(one, key=str) == sorted(other, key=str)


@pytest.mark.parametrize("version", [HELM_3, HELM_4])
def test_it_can_be_part_of_another_chart(version: str, tmp_path: Path) -> None:
    """The other chart gives values for all of its parts."""
    shutil.copytree(CHART, tmp_path / "charts/bootseer")
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: site, version: 0.1.0}")
    text = helm("template", "site", tmp_path, "--set=global.a=b", version=version)
    assert "name: bootseer-mounts" in text


def test_names_fit_together(installed: list[Object]) -> None:
    """Selectors, accounts, roles and volumes refer to existing objects."""
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
    """containerd and the kubelet are given paths of these containers."""
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


def test_no_probe_ends_the_mounts_of_a_node(installed: list[Object]) -> None:
    """A restart of the spawner ends mounts; a restart of the driver is not noticed by pods."""
    asked = {
        one["name"]: "livenessProbe" in one
        for _, pod in pods(installed)
        for one in pod["spec"]["containers"]
    }
    assert asked["csi"]
    assert not asked["spawner"]


def test_the_webhook_is_only_in_the_way_of_pods_that_ask_for_it(installed: list[Object]) -> None:
    for one in installed:
        for hook in one.get("webhooks", ()):
            assert hook["timeoutSeconds"] <= 5
            selected = {
                each["key"]: (each["operator"], each["values"])
                for each in hook["objectSelector"]["matchExpressions"]
            }
            # Bootseer's own pods start without the webhook.
            assert selected["app.kubernetes.io/name"] == ("NotIn", ["bootseer"])
            # Each pod matches at most one entry.
            operator = {"Fail": "In", "Ignore": "NotIn"}[hook["failurePolicy"]]
            assert selected["bootseer.io/checkpoint"] == (operator, ["required"])


def test_numbers_of_settings_stay_what_they_are() -> None:
    """Numbers in a file of values are floats for Helm: 2e+11 is not a size."""
    found = rendered({"settings": {"cache_limit": 200_000_000_000, "deadline": 12.5}})
    (config,) = [one for one in found if one["metadata"]["name"] == "bootseer-config"]
    said = tomllib.loads(config["data"]["bootseer.toml"])
    assert (said["cache_limit"], said["deadline"]) == ("200000000000", "12.5")


def test_names_of_digits_stay_names() -> None:
    """Kubernetes accepts such names as strings only."""
    values = {
        "imagePullSecrets": ["70001"],
        "storeSecret": "70002",
        "priorityClassName": "70003",
        "nodeSelector": {"zone": "70004"},
        "warm": EVERYTHING["warm"],
        "webhook": {"priorityClassName": "70005", "nodeSelector": {"zone": "70006"}},
    }
    words = ("template", "70007", CHART, "--namespace", "70008", "--values", "-")
    text = helm(*words, version=HELM_4, text=json.dumps(values))
    said = {one for each in yaml.safe_load_all(text) for one in scalars(each)}
    assert not {one for one in said if isinstance(one, int) and 70000 < one < 70010}
    assert {str(70000 + number) for number in range(1, 9)} <= said


def scalars(of: Any) -> Iterator[Any]:
    if isinstance(of, dict | list):
        for one in of.values() if isinstance(of, dict) else of:
            yield from scalars(one)
    else:
        yield of


def test_the_webhook_runs_where_its_values_say() -> None:
    each: tuple[Object, ...] = ({}, EVERYTHING)
    for values in each:
        (pod,) = [pod["spec"] for name, pod in pods(rendered(values)) if name.endswith("-webhook")]
        said = {**DEFAULTS["webhook"], **values.get("webhook", {})}
        assert pod["priorityClassName"] == said["priorityClassName"]
        assert pod.get("nodeSelector", {}) == said["nodeSelector"]
        assert pod.get("tolerations", []) == said["tolerations"]


@pytest.mark.parametrize("folder", ["/etc/containerd/certs.d", "/k3s/certs.d", ""])
def test_registries_are_reached_as_the_node_s_containerd_reaches_them(folder: str) -> None:
    found = rendered({"warm": EVERYTHING["warm"], "containerd": {"registryHostsDir": folder}})
    (config,) = [one for one in found if one["metadata"]["name"] == "bootseer-config"]
    said = tomllib.loads(config["data"]["bootseer.toml"]).get("registry_hosts_dir", "")
    assert said == folder
    for _, pod in pods(found):
        for one in containers(pod):
            mounts = {mount["name"]: mount for mount in one.get("volumeMounts", ())}
            readers = {"spawner", "snapshotter", "csi", "warm"} if folder else set()
            assert ("registries" in mounts) == (one["name"] in readers)
            assert mounts.get("registries", {"readOnly": True})["readOnly"]


def test_without_the_snapshotter_pods_get_no_runtime_class_and_containerd_no_lines() -> None:
    """Pods of a class without a running snapshotter would never start."""
    found = rendered({"snapshotter": {"enabled": False}})
    assert "RuntimeClass" not in {one["kind"] for one in found}
    names = {one["name"] for _, pod in pods(found) for one in containers(pod)}
    assert names == {"spawner", "csi", "webhook"}


def test_volumes_feed_each_other_where_servers_have_the_node_s_network() -> None:
    for values, address in (
        ({}, ["--fanout-address=$(NODE_ADDRESS)"]),
        ({"hostNetwork": False}, []),
    ):
        (node,) = [pod for name, pod in pods(rendered(values)) if name == "bootseer-node"]
        (driver,) = [one for one in containers(node) if one["name"] == "csi"]
        assert [word for word in driver["command"] if "fanout" in word] == address
        names = {one["name"]: one for one in driver["env"]}
        found = names.get("NODE_ADDRESS", {}).get("valueFrom")
        assert found == ({"fieldRef": {"fieldPath": "status.podIP"}} if address else None)


def test_the_warm_up_at_a_time_of_the_day_may_what_the_chart_s_may() -> None:
    found = rendered({"warm": EVERYTHING["warm"]})
    (ours,) = [pod["spec"] for name, pod in pods(found) if name == "bootseer-warm"]
    text = (CHART.parent / "warm-cronjob.yaml").read_text()
    theirs = yaml.safe_load(text)["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    one, other = ours["containers"][0], theirs["containers"][0]
    assert one["securityContext"] == other["securityContext"]
    for some, others in ((one["volumeMounts"], other["volumeMounts"]),
                         (ours["volumes"], theirs["volumes"])):  # fmt: skip
        assert {each["name"]: each for each in some} == {each["name"]: each for each in others}


def test_older_clusters_get_what_they_know() -> None:
    for kubernetes, known in (("1.20.15", "policy/v1beta1"), ("1.21.0", "policy/v1")):
        found = rendered({}, kubernetes=kubernetes)
        (budget,) = [one for one in found if one["kind"] == "PodDisruptionBudget"]
        assert budget["apiVersion"] == known


def test_rights_are_those_of_the_table() -> None:
    """SECURITY.md lists the rights of each container."""
    text = SECURITY.read_text().partition("\n## In a Kubernetes cluster\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| `")]
    said = {row[0].strip("| "): tuple(cell.strip() for cell in row[1:5]) for row in rows}
    found = rendered({"warm": EVERYTHING["warm"]})
    assert said == dict(rights_of(found))


def rights_of(found: list[Object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield for each container: user and privilege, namespaces and folders of the node, API
    rights."""
    for name, pod in pods(found):
        spec = pod["spec"]
        shared = [kind for kind in ("Network", "PID", "IPC") if spec.get(f"host{kind}")]
        folders = {
            v["name"]: v["hostPath"]["path"] for v in spec.get("volumes", ()) if "hostPath" in v
        }
        for one in containers(pod):
            may = {**spec.get("securityContext", {}), **one["securityContext"]}
            user = "privileged" if may.get("privileged") else f"user {may['runAsUser']}"
            seen = sorted(
                f"`{folders[mount['name']]}`{' (read)' if mount.get('readOnly') else ''}"
                for mount in one.get("volumeMounts", ())
                if mount["name"] in folders
            )
            account = spec.get("serviceAccountName")
            rules = []
            if account and spec.get("automountServiceAccountToken", True):
                rules = sorted(
                    f"{', '.join(rule['verbs'])} {kind} `{', '.join(rule['resourceNames'])}`"
                    for role in found
                    if role["kind"] in ("Role", "ClusterRole")
                    and role["metadata"]["name"] == account
                    for rule in role["rules"]
                    for kind in rule["resources"]
                )
            cells = (user, ", ".join(shared), "<br>".join(seen), "<br>".join(rules))
            yield f"`{name}` {one['name']}", tuple(cell or "none" for cell in cells)


def test_who_mounts_nothing_has_no_privilege(installed: list[Object]) -> None:
    """Only containers that mount for the node or change containerd's configuration are
    privileged."""
    for name, pod in pods(installed):
        for one in containers(pod):
            may = {**pod["spec"].get("securityContext", {}), **one["securityContext"]}
            if name in ("bootseer-mounts", "bootseer-node"):
                continue
            assert not may.get("privileged")
            assert may["allowPrivilegeEscalation"] is False
            assert may["readOnlyRootFilesystem"]
            assert may["capabilities"] == {"drop": ["ALL"]}
            assert may["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_webhook_fits_into_a_restricted_namespace(installed: list[Object]) -> None:
    for name, pod in pods(installed):
        if name == "bootseer-webhook":
            assert pod["spec"]["securityContext"]["runAsNonRoot"]
            assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & set(pod["spec"])
            return


def test_no_account_may_do_more_than_with_one_named_object(installed: list[Object]) -> None:
    for one in installed:
        for rule in one.get("rules", ()) if one["kind"] in ("Role", "ClusterRole") else ():
            assert rule["resourceNames"]
            assert set(rule["verbs"]) <= {"get", "update", "patch"}


def test_keys_of_fan_outs_are_created_and_never_read() -> None:
    """A rule for `create` cannot name objects; a rule for `get` must."""
    found = rendered({"webhook": {"fanoutKeys": True}})
    rules = [rule for one in found if "Role" in one["kind"] for rule in one.get("rules", ())]
    unnamed = [rule for rule in rules if "resourceNames" not in rule]
    assert unnamed == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}]
