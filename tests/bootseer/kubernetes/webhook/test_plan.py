"""The webhook's changes of pods: each rule with a pod for it."""

import json
from typing import Any

import pytest

from bootseer.kubernetes.webhook.plan import Cluster
from tests.bootseer.kubernetes.webhook.pod_objects import (
    CLUSTER,
    JOB_UID,
    patched,
    planned,
    pod_object,
    variables,
)

REPLAY = {"bootseer.io/replay": "auto"}
ENVIRONMENT = {"bootseer.io/environment": "llm-2"}
CHECKPOINT = {"bootseer.io/checkpoint": "hdfs://namenode/ckpt/llm"}
HANDLER = "io.containerd.cri.runtime-handler"


def test_a_replayed_pod_gets_class_handler_and_identity() -> None:
    pod = patched(pod_object(REPLAY))
    assert pod["spec"]["runtimeClassName"] == "bootseer"
    assert pod["metadata"]["annotations"] == {**REPLAY, HANDLER: "bootseer-handler"}
    assert variables(pod) == {
        "BOOTSEER_JOB": "train",
        "BOOTSEER_SUBMISSION": JOB_UID,
        "BOOTSEER_STORE": "hdfs://namenode/store",
        "BOOTSEER_NODE": "spec.nodeName",
    }
    assert "volumes" not in pod["spec"]


def test_volumes_are_mounted_in_every_container() -> None:
    init = {"name": "init", "env": [{"name": "A", "value": "1"}], "volumeMounts": []}
    data = {"name": "data", "emptyDir": {}}
    pod = patched(
        pod_object(
            {**ENVIRONMENT, **CHECKPOINT, "bootseer.io/checkpoint-path": "/mnt/ckpt"},
            initContainers=[init],
            volumes=[data],
        )
    )
    # The driver notes by them which start it has mounted for.
    start = {"job": "train", "submission": JOB_UID}
    environment = {"kind": "environment", "environment": "llm-2", **start}
    checkpoint = {"kind": "checkpoint", "source": "hdfs://namenode/ckpt/llm", **start}
    driver = "csi.bootseer.io"
    assert pod["spec"]["volumes"] == [
        data,
        {
            "name": "bootseer-environment",
            "csi": {"driver": driver, "volumeAttributes": environment, "readOnly": True},
        },
        {"name": "bootseer-checkpoint", "csi": {"driver": driver, "volumeAttributes": checkpoint}},
    ]
    mounts = [
        {"name": "bootseer-environment", "mountPath": "/opt/environment", "readOnly": True},
        {"name": "bootseer-checkpoint", "mountPath": "/mnt/ckpt"},
    ]
    for kind in ("containers", "initContainers"):
        assert pod["spec"][kind][0]["volumeMounts"] == mounts
        assert variables(pod, kind)["BOOTSEER_JOB"] == "train"
    assert variables(pod, "initContainers")["A"] == "1"
    assert "runtimeClassName" not in pod["spec"]


@pytest.mark.parametrize(
    "annotations",
    [
        None,
        {},
        {"bootseer.io/checkpoint-path": "/x", "example.com/replay": "auto"},
        {"bootseer.io/environment": "", "bootseer.io/replay": "off"},
        {**REPLAY, "kubernetes.io/config.mirror": "a1"},
    ],
)
def test_pods_without_a_request_stay_as_they_are(annotations: dict[str, str] | None) -> None:
    plan = planned(pod_object(annotations))
    assert not plan.patch
    assert not plan.warnings


def test_what_a_pod_says_itself_stays() -> None:
    env = [
        {"name": "BOOTSEER_JOB", "value": "mine"},
        {"name": "BOOTSEER_STORE", "value": "file:///mine"},
        {"name": "BOOTSEER_NODE", "value": "n"},
        {"name": "RANK", "value": "3"},
    ]
    labels = {"job-name": "j", "batch.kubernetes.io/job-completion-index": "5"}
    containers = [{"name": "a", "env": env}, {"name": "b", "envFrom": [{"configMapRef": {}}]}]
    pod = patched(pod_object(REPLAY, labels, containers=containers))
    assert variables(pod) == {
        "BOOTSEER_JOB": "mine",
        "BOOTSEER_STORE": "file:///mine",
        "BOOTSEER_NODE": "n",
        "RANK": "3",
        "BOOTSEER_SUBMISSION": JOB_UID,
    }
    # A ConfigMap may name another store, and is weaker than a variable.
    assert "BOOTSEER_STORE" not in variables(pod, place=1)
    assert variables(pod, place=1)["BOOTSEER_RANK"] == "5"


def test_values_are_no_references_to_other_variables() -> None:
    cluster = Cluster(has_driver=True, handler="h", store_url="file:///a$(HOME)")
    assert variables(patched(pod_object(REPLAY), cluster))["BOOTSEER_STORE"] == "file:///a$$(HOME)"


@pytest.mark.parametrize(
    ("annotations", "spec", "cluster", "says"),
    [
        ({"bootseer.io/replay": "yes"}, {}, {}, "neither auto nor off"),
        (REPLAY, {"runtimeClassName": "gvisor"}, {}, "runtimeClassName 'gvisor'"),
        (REPLAY, {}, {"handler": ""}, "no runtime class 'bootseer'"),
        (REPLAY, {"hostUsers": False}, {}, "user namespace"),
        ({**REPLAY, HANDLER: "kata"}, {}, {}, "another io.containerd"),
        ({**REPLAY, "x": "y" * (256 * 1024 - 400)}, {}, {}, "no room"),
        (ENVIRONMENT, {}, {"has_driver": False}, "no CSI driver"),
        ({**ENVIRONMENT, "bootseer.io/environment-path": "opt"}, {}, {}, "not a path"),
        ({**ENVIRONMENT, "bootseer.io/environment-path": "/usr/.."}, {}, {}, "not a path"),
        ({**ENVIRONMENT, "bootseer.io/environment-path": "/proc/1"}, {}, {}, "not a path"),
        ({**ENVIRONMENT, "bootseer.io/environment-path": "/a:b"}, {}, {}, "not a path"),
        ({**ENVIRONMENT, "bootseer.io/environment-path": "//etc"}, {}, {}, "not a path"),
        ({"bootseer.io/checkpoint": "/mnt/x"}, {}, {}, "not a URL"),
        ({"bootseer.io/checkpoint": "s3://b/x::file:///etc"}, {}, {}, "a chain of URLs"),
        ({"bootseer.io/environment": "a/../b"}, {}, {}, "not the name of a snapshot"),
        (
            ENVIRONMENT,
            {"volumes": [{"name": "bootseer-environment", "emptyDir": {}}]},
            {},
            "another volume called",
        ),
        (
            ENVIRONMENT,
            {
                "containers": [
                    {"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/opt/environment/"}]}
                ]
            },
            {},
            "in container 'c': it has another volume",
        ),
        (
            ENVIRONMENT,
            {"containers": [{"name": "c", "volumeDevices": [{"devicePath": "/opt/environment"}]}]},
            {},
            "in container 'c': it has another volume",
        ),
    ],
)
def test_what_cannot_be_done_is_a_warning_and_left_out(
    annotations: dict[str, str], spec: dict[str, Any], cluster: dict[str, Any], says: str
) -> None:
    found = Cluster(**{"has_driver": True, "handler": "h", **cluster})
    before = pod_object(annotations, **spec)
    plan = planned(before, found)
    assert len(plan.warnings) == 1
    assert says in plan.warnings[0]
    pod = patched(before, found)
    assert pod["spec"].get("runtimeClassName") == spec.get("runtimeClassName")
    mounts = [container.get("volumeMounts") for container in pod["spec"]["containers"]]
    assert mounts == [one.get("volumeMounts") for one in before["spec"]["containers"]]
    noted = pod["metadata"]["annotations"].get("bootseer.io/warnings", "")
    assert f"bootseer: {noted}" == plan.warnings[0] or "no room" in says


def test_a_misspelt_label_is_a_warning() -> None:
    label = {"bootseer.io/checkpoint": "require"}
    assert "'require', which is not required" in planned(pod_object(CHECKPOINT, label)).warnings[0]


def test_two_volumes_with_one_path_are_left_out() -> None:
    paths = {"bootseer.io/environment-path": "/a", "bootseer.io/checkpoint-path": "/a"}
    plan = planned(pod_object({**ENVIRONMENT, **CHECKPOINT, **paths}))
    assert len(plan.warnings) == 2
    assert "volumes" not in json.dumps(plan.patch)


def test_a_checkpoint_folder_is_never_left_out_for_a_missing_driver() -> None:
    """The trainer would begin at step 0, and save to the node's disk."""
    plan = planned(pod_object(CHECKPOINT), Cluster(has_driver=False, handler=""))
    assert "waits for its checkpoint folder" in plan.warnings[0]
    assert [one["value"] for one in plan.patch if one["path"] == "/spec/volumes"]


def test_windows_pods_are_left_alone() -> None:
    for spec in ({"os": {"name": "windows"}}, {"nodeSelector": {"kubernetes.io/os": "windows"}}):
        plan = planned(pod_object(REPLAY, **spec))
        assert not plan.patch
        assert "Windows" in plan.warnings[0]


def test_passwords_of_urls_are_not_repeated() -> None:
    plan = planned(pod_object({"bootseer.io/checkpoint": "s3://user:geheim@host/a b"}))
    assert "geheim" not in plan.warnings[0]


def test_a_pod_is_told_of_no_store_where_none_is_named() -> None:
    cluster = Cluster(has_driver=True, handler="h")
    assert "BOOTSEER_STORE" not in variables(patched(pod_object(REPLAY), cluster))


def test_a_second_look_changes_nothing() -> None:
    once = patched(pod_object({**REPLAY, **ENVIRONMENT, **CHECKPOINT}))
    assert not planned(once, CLUSTER).patch


def test_a_second_look_takes_its_volumes_for_its_own_though_the_start_is_another() -> None:
    """Another webhook may label the pod in between."""
    pod = patched(pod_object({**ENVIRONMENT, **CHECKPOINT}))
    pod["metadata"]["labels"]["ray.io/cluster"] = "ray"
    again = planned(pod)
    assert (again.patch, again.warnings, again.has_checkpoint) == ((), (), True)
    pod["metadata"]["annotations"] |= {"bootseer.io/checkpoint": "hdfs://namenode/other"}
    assert "another volume called" in planned(pod).warnings[0]


FANOUT = {"bootseer.io/fanout-hosts": "auto"}


def _fanout(pod: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the reference to the key, and the host list."""
    found = {one["name"]: one for one in patched(pod)["spec"]["containers"][0]["env"]}
    hosts = found.get("BOOTSEER_FANOUT_HOSTS", {}).get("value", "")
    return found["BOOTSEER_FANOUT_KEY"]["valueFrom"]["secretKeyRef"], hosts


def test_pods_of_one_submission_name_one_secret() -> None:
    first, hosts = _fanout(pod_object(FANOUT))
    assert (first["optional"], hosts) == (True, "")
    assert _fanout(pod_object(FANOUT)) == (first, "")
    again = {"controller-uid": "another", "job-name": "train"}
    assert _fanout(pod_object(FANOUT, again))[0]["name"] != first["name"]
    planned_secret = planned(pod_object(FANOUT)).secret
    assert planned_secret is not None
    assert planned_secret.name == first["name"]
    assert planned(patched(pod_object(FANOUT))).patch == ()
    assert planned(pod_object(REPLAY)).secret is None


def test_a_pod_may_name_the_hosts() -> None:
    hosts = "llm-[0-7].llm"
    assert _fanout(pod_object({"bootseer.io/fanout-hosts": hosts}))[1] == hosts


def test_pods_of_a_job_set_of_several_jobs_are_told_their_hosts() -> None:
    prefix = "jobset.sigs.k8s.io/"
    names = {"jobset-name": "llm", "jobset-uid": "u-1", "replicatedjob-name": "node"}
    labels = {prefix + name: value for name, value in names.items()}
    labels |= {prefix + "replicatedjob-replicas": "4"}
    command = ["torchrun", "--nnodes=8", "train.py"]
    pod = pod_object(
        FANOUT, labels, subdomain="llm", containers=[{"name": "a", "command": command}]
    )
    assert _fanout(pod)[1] == "llm-node-[0-3]-[0-1].llm"
    secret = planned(pod).secret
    assert secret is not None
    assert (secret.owner.kind, secret.owner.name, secret.owner.uid) == ("JobSet", "llm", "u-1")
    for change in ({"subdomain": ""}, {"containers": [{"name": "a"}]}):
        pod["spec"] |= change
        assert _fanout(pod)[1] == ""


def test_an_environment_s_volume_is_told_the_number_of_nodes() -> None:
    command = ["torchrun", "--nnodes=8", "train.py"]
    spec: dict[str, Any] = {"containers": [{"name": "a", "command": command}]}
    pod = patched(pod_object({**ENVIRONMENT, **FANOUT}, **spec))
    (volume,) = pod["spec"]["volumes"]
    assert volume["csi"]["volumeAttributes"]["nodes"] == "8"
    assert planned(pod).patch == ()
    several = {"jobset.sigs.k8s.io/replicatedjob-replicas": "4", "job-name": "train"}
    for unknown in (
        pod_object(ENVIRONMENT, **spec),
        pod_object({**ENVIRONMENT, **FANOUT}),
        pod_object({**ENVIRONMENT, **FANOUT}, several, **spec),
    ):
        (volume,) = patched(unknown)["spec"]["volumes"]
        assert "nodes" not in volume["csi"]["volumeAttributes"]


@pytest.mark.parametrize(
    ("annotation", "owner", "says"),
    [
        ("yes please", None, "no fan-out: the annotation"),
        ("n[0-", None, "no fan-out: the annotation"),
        ("auto", {"kind": "", "name": "", "uid": ""}, "has no owner"),
    ],
)
def test_a_fan_out_that_cannot_be(annotation: str, owner: Any, says: str) -> None:
    plan = planned(pod_object({"bootseer.io/fanout-hosts": annotation}, {}, owner))
    assert says in " ".join(plan.warnings)
    assert plan.secret is None
    assert "BOOTSEER_FANOUT" not in json.dumps(plan.patch)
