"""The webhook on a cluster: annotated Jobs and StatefulSets, other pods, and its absence."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from testbed.containers.chart import NAMESPACE
from testbed.kubernetes.cluster import KubernetesCluster
from testbed.kubernetes.installation import Installation
from testbed.kubernetes.objects import pod
from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

_NAME = "bootseer-webhook"
_SPACE = "training"
_RECIPES = REPOSITORY / "docker/kubernetes/recipes"
_SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


class _Site:
    """Cluster with Bootseer, and a namespace for users."""

    def __init__(self, installed: Installation) -> None:
        self.cluster, self.installed = installed.cluster, installed
        self.image = installed.image

    def scale(self, count: int) -> None:
        """Run `count` replicas of the webhook, and wait until they answer."""
        where = ("--namespace", NAMESPACE)
        self.cluster.kubectl("scale", "deployment", _NAME, f"--replicas={count}", *where)

        def are_ready() -> bool:
            endpoints = self.cluster.get("endpoints", _NAME, NAMESPACE)
            subsets = endpoints.get("subsets") or [{}]
            return len(subsets[0].get("addresses") or ()) == count

        wait_for(are_ready, f"{count} replicas of the webhook", timeout_s=120, interval_s=0.5)

    def run(self, name: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a pod that prints its variables, and return it when it has ended."""
        self.cluster.apply(self.pod(name, annotations))
        return self.cluster.wait_pod(name, "Succeeded", namespace=_SPACE)

    def pod(self, name: str, annotations: dict[str, str] | None) -> dict[str, Any]:
        """Return a pod that prints its variables."""
        found = pod(name, self.image, "", annotations=annotations)
        found["metadata"]["namespace"] = _SPACE
        found["spec"]["securityContext"] = {
            "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}
        }  # fmt: skip
        found["spec"]["containers"][0] |= {
            "command": ["python3", "-c", _SHOW],
            "securityContext": {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
            },
        }  # fmt: skip
        return found

    def variables(self, name: str) -> dict[str, str]:
        """Return the variables that a pod has printed."""
        shown: dict[str, str] = json.loads(
            self.cluster.kubectl("logs", name, "--namespace", _SPACE)
        )
        return shown

    def recipe(self, name: str) -> dict[str, Any]:
        """Apply a documented recipe with an image of this cluster; return the owner of its pods.

        Parts that its pods cannot have here are left out.
        """
        documents = list(yaml.safe_load_all((_RECIPES / f"{name}.yaml").read_text()))
        owner: dict[str, Any] = documents[-1]
        template = owner["spec"]["template"]
        for volume in ("environment", "checkpoint"):
            template["metadata"]["annotations"].pop(f"bootseer.io/{volume}", None)
        template["metadata"].setdefault("labels", {}).pop("bootseer.io/checkpoint", None)
        container = template["spec"]["containers"][0]
        container.pop("args", None)
        wait = "; import time; time.sleep(3600)" if owner["kind"] == "StatefulSet" else ""
        container |= {"image": self.image, "command": ["python3", "-uc", _SHOW + wait]}
        # This Kubernetes drops fields that it does not know, such as completionMode.
        words = ("apply", "--validate=false", "--namespace", _SPACE, "--filename", "-")
        self.cluster.kubectl(*words, text=json.dumps({"kind": "List", "apiVersion": "v1",
                                                      "items": documents}))  # fmt: skip
        return self.cluster.get(owner["kind"], owner["metadata"]["name"], _SPACE)

    def pods_of(self, owner: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the pods of an owner once `count` of them have printed their variables."""
        uid = owner["metadata"]["uid"]

        def found() -> list[dict[str, Any]]:
            pods = self.cluster.list("pods", "--namespace", _SPACE)
            owned = [
                one
                for one in pods
                if uid in [ref["uid"] for ref in one["metadata"].get("ownerReferences", ())]
                and one["status"].get("phase") in ("Running", "Succeeded")
            ]
            logs = [
                self.cluster.try_kubectl("logs", one["metadata"]["name"], "--namespace", _SPACE)
                for one in owned
            ]
            return owned if all(log.stdout.strip() for log in logs) else []

        wait_for(lambda: len(found()) >= count, "the owner's pods", timeout_s=180, interval_s=0.5)
        return sorted(found(), key=lambda one: str(one["metadata"]["name"]))


@pytest.fixture(scope="module")
def site(cluster: KubernetesCluster, installed: Installation) -> Iterator[_Site]:
    found = _Site(installed)
    # API servers enforce this since 1.25.
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": _SPACE, "labels": labels}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        yield found
    finally:
        cluster.kubectl("delete", "namespace", _SPACE, "--timeout=120s", timeout_s=180)
        found.scale(2)


def _comparable(found: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's own fields and defaults, without those that differ between any two pods."""
    names = ("annotations", "labels", "ownerReferences")
    metadata = {name: found["metadata"].get(name) for name in names}
    metadata["annotations"] = {
        name: text
        for name, text in (metadata["annotations"] or {}).items()
        if not name.startswith("kubectl.kubernetes.io/")
    }
    metadata["labels"].pop("name", None)
    spec = {name: value for name, value in found["spec"].items() if name != "nodeName"}
    # Since Kubernetes 1.21 the volume of the pod's token has a name of its own.
    text = re.sub(r"kube-api-access-\w+", "kube-api-access", json.dumps(spec))
    return {"metadata": metadata, "spec": json.loads(text)}


def test_pods_of_a_job_are_told_their_start(site: _Site) -> None:
    job = site.recipe("job")
    (found,) = site.pods_of(job, 1)
    assert found["spec"]["runtimeClassName"] == "bootseer"
    handler = site.cluster.get("runtimeclass", "bootseer")["handler"]
    assert found["metadata"]["annotations"]["io.containerd.cri.runtime-handler"] == handler
    told = site.variables(found["metadata"]["name"])
    assert told["BOOTSEER_JOB"] == "train"
    assert told["BOOTSEER_SUBMISSION"] == job["metadata"]["uid"]
    assert told["BOOTSEER_NODE"] == found["spec"]["nodeName"]
    assert told["BOOTSEER_STORE"] == f"{site.cluster.hdfs.url}/bootseer"


def test_their_start_is_told_by_what_the_cluster_knows_of_them(site: _Site, tmp_path: Path) -> None:
    """On a machine that has only kubectl."""
    (found,) = site.pods_of(site.recipe("job"), 1)
    asked = ("get", "pods,events", "--namespace", _SPACE, "--output", "json")
    (tmp_path / "events.json").write_text(site.cluster.kubectl(*asked))
    done = CliRunner().invoke(
        cli,
        [
            *("--timeline-dir", str(tmp_path), "--store", f"file://{tmp_path}/store"),
            *("report", "train", "--json", "--with", f"kubernetes={tmp_path}/events.json"),
        ],
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    owner = found["metadata"]["ownerReferences"][0]
    assert report["submission"] == owner["uid"]
    stages = {stage["name"] for stage in report["stages"]}
    assert stages >= {"pod scheduling", "pod set-up", "container create", "container start"}


def test_a_timeline_outlives_its_pod(site: _Site) -> None:
    """`bootseer run` in a pod copies it to the store that the webhook has named."""
    document = site.pod("noted", {"bootseer.io/replay": "auto"})
    # The container runs on after the job until the timeline is stored.
    script = "bootseer run -- python3 -c 'print(1)'; sleep 8"
    # The store belongs to another user than the pod's, who has a number only.
    user = {"name": "HADOOP_USER_NAME", "value": "root"}
    document["spec"]["containers"][0] |= {"command": ["sh", "-c", script], "env": [user]}
    site.cluster.apply(document)
    found = site.cluster.wait_pod("noted", "Succeeded", namespace=_SPACE)
    site.cluster.kubectl("delete", "pod", "noted", "--namespace", _SPACE)
    words = ("report", "noted", "--json")
    store = ("--store", f"{site.cluster.hdfs.url}/bootseer")
    done = site.cluster.lan.run(sys.executable, "-m", "bootseer", *store, *words, timeout_s=120)
    report = json.loads(done.stdout)
    assert report["submission"] == found["metadata"]["uid"]
    assert report["total"]["slowest_node"] == f"{found['spec']['nodeName']}/0"


def test_pods_of_an_indexed_job_share_a_submission(site: _Site) -> None:
    """Before 1.21, Kubernetes has no indexes, and runs it as a Job of four pods."""
    job = site.recipe("indexed-job")
    pods = site.pods_of(job, 4)
    told = [site.variables(one["metadata"]["name"]) for one in pods]
    assert {one["BOOTSEER_SUBMISSION"] for one in told} == {job["metadata"]["uid"]}
    assert {one["BOOTSEER_JOB"] for one in told} == {"train-indexed"}
    if site.cluster.release("kube-apiserver") >= (1, 21):
        assert sorted(one["JOB_COMPLETION_INDEX"] for one in told) == list("0123")


def test_pods_of_a_stateful_set_have_their_ordinals_as_ranks(site: _Site) -> None:
    found = site.recipe("statefulset")
    pods = site.pods_of(found, 2)
    told = [site.variables(one["metadata"]["name"]) for one in pods]
    assert [one["BOOTSEER_RANK"] for one in told] == ["0", "1"]
    assert {one["BOOTSEER_SUBMISSION"] for one in told} == {found["metadata"]["uid"]}
    # Another submission is another set of pods.
    site.cluster.kubectl("delete", "statefulset", "train-set", "--namespace", _SPACE)


def test_a_pod_by_itself_is_its_own_submission(site: _Site) -> None:
    found = site.run("alone", {"bootseer.io/replay": "auto"})
    assert site.variables("alone")["BOOTSEER_SUBMISSION"] == found["metadata"]["uid"]


def test_what_cannot_be_done_is_said_at_the_pod(site: _Site) -> None:
    asked = {"bootseer.io/replay": "auto", "bootseer.io/environment": "no/name"}
    found = site.run("warned", asked)
    assert "not the name of a snapshot" in found["metadata"]["annotations"]["bootseer.io/warnings"]


def test_an_upgrade_takes_its_certificate_from_nobody(site: _Site) -> None:
    kinds = (("secret", _NAME, NAMESPACE), ("mutatingwebhookconfiguration", _NAME, ""))
    before = [site.cluster.get(*kind) for kind in kinds]
    assert before[0]["data"]["tls.crt"]
    site.installed.apply()
    after = [site.cluster.get(*kind) for kind in kinds]
    assert after[0]["data"] == before[0]["data"]
    assert bundles(before[1]) == bundles(after[1])


def bundles(configuration: dict[str, Any]) -> set[str]:
    return {hook["clientConfig"]["caBundle"] for hook in configuration["webhooks"]}


def test_other_pods_are_the_same_with_and_without_the_webhook(site: _Site) -> None:
    before = site.run("plain-1", {"example.com/replay": "auto"})
    site.scale(0)
    after = site.run("plain-2", {"example.com/replay": "auto"})
    assert _comparable(before) == _comparable(after)
    assert "BOOTSEER_JOB" not in site.variables("plain-1")


def test_a_pod_that_asks_for_nothing_is_not_sent_to_the_webhook(site: _Site) -> None:
    if site.cluster.release("kube-apiserver") < (1, 28):
        raise MissingError("an API server before 1.28 has no match conditions")
    site.scale(2)
    wait_for(
        lambda: "matchConditions" in json.dumps(site.cluster.list("mutatingwebhookconfigurations")),
        "the conditions",
    )

    def requests() -> float:
        lines = site.cluster.kubectl("get", "--raw", "/metrics").splitlines()
        counted = "apiserver_admission_webhook_request_total{"
        ours = (line for line in lines if line.startswith(counted) and "pods.bootseer.io" in line)
        return sum(float(line.split()[-1]) for line in ours)

    before = requests()
    site.run("unasked")
    assert requests() == before
    site.run("asked", {"bootseer.io/replay": "auto"})
    assert requests() == before + 1


def test_without_the_webhook_annotated_pods_start_the_ordinary_way(site: _Site) -> None:
    site.scale(0)
    found = site.run("ordinary", {"bootseer.io/replay": "auto"})
    assert "runtimeClassName" not in found["spec"]
    site.scale(1)
    found = site.run("again", {"bootseer.io/replay": "auto"})
    assert found["spec"]["runtimeClassName"] == "bootseer"


def test_without_the_webhook_pods_that_require_their_checkpoints_are_not_created(
    site: _Site,
) -> None:
    """Their owner reports the reason, and makes them when the webhook is back."""
    site.scale(0)
    template = site.pod("saves", {"bootseer.io/checkpoint": "hdfs://namenode/checkpoints"})
    template["metadata"]["labels"]["bootseer.io/checkpoint"] = "required"
    metadata = {"name": "saves", "namespace": _SPACE}
    words = {name: template["metadata"][name] for name in ("annotations", "labels")}
    spec = {"template": {"metadata": words, "spec": template["spec"]}}
    site.cluster.apply(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    )
    why = 'failed calling webhook "checkpoints.bootseer.io"'
    wait_for(lambda: why in site.cluster.events("saves", _SPACE), "the Job's event", interval_s=0.5)
    owned = ("pods", "--namespace", _SPACE, "--selector=job-name=saves")
    assert not site.cluster.list(*owned)
    site.scale(1)
    wait_for(lambda: site.cluster.list(*owned), "the Job's pod", timeout_s=180, interval_s=0.5)
    (found,) = site.cluster.list(*owned)
    assert [one["name"] for one in found["spec"]["volumes"]][-1] == "bootseer-checkpoint"
    site.cluster.kubectl("delete", "job", "saves", "--namespace", _SPACE)
