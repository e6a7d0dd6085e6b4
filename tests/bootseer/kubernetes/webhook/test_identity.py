"""The start that a pod belongs to, by the notes of each controller at its pods."""

from typing import Any

import pytest

from tests.bootseer.kubernetes.webhook.pod_objects import patched, variables

INDEX = "batch.kubernetes.io/job-completion-index"


def _found(metadata: dict[str, Any]) -> tuple[str, ...]:
    """Return the job, submission, attempt and rank that a replayed pod's containers get."""
    annotations = {"bootseer.io/replay": "auto", **metadata.get("annotations", {})}
    pod = {
        "metadata": {**metadata, "annotations": annotations},
        "spec": {"containers": [{"name": "trainer", "image": "trainer"}]},
    }
    told = variables(patched(pod))
    names = ("JOB", "SUBMISSION", "ATTEMPT", "RANK")
    return tuple(told.get(f"BOOTSEER_{name}", "") for name in names)


def _owned(kind: str, name: str = "x", uid: str = "u-1") -> list[dict[str, Any]]:
    other = {"kind": "Other", "name": "o", "uid": "u-9"}
    return [other, {"kind": kind, "name": name, "uid": uid, "controller": True}]


@pytest.mark.parametrize(
    ("metadata", "is_of"),
    [
        pytest.param(
            {"labels": {"job-name": "train", "controller-uid": "u-2"}},
            ("train", "u-2", "", ""),
            id="Job of Kubernetes 1.20",
        ),
        pytest.param(
            {
                "labels": {
                    "job-name": "train",
                    "batch.kubernetes.io/job-name": "train",
                    "batch.kubernetes.io/controller-uid": "u-2",
                    INDEX: "3",
                },
                "annotations": {INDEX: "3", "batch.kubernetes.io/job-index-failure-count": "2"},
            },
            ("train", "u-2", "2", "3"),
            id="Indexed Job with backoffLimitPerIndex",
        ),
        pytest.param(
            {
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": "llm",
                    "jobset.sigs.k8s.io/jobset-uid": "set-1",
                    "jobset.sigs.k8s.io/restart-attempt": "4",
                    "batch.kubernetes.io/job-name": "llm-workers-0",
                    "batch.kubernetes.io/controller-uid": "job-7",
                    INDEX: "1",
                },
                "ownerReferences": _owned("Job"),
            },
            ("llm", "set-1", "4", "1"),
            id="JobSet, and Trainer's TrainJob",
        ),
        pytest.param(
            {
                "labels": {
                    "training.kubeflow.org/job-name": "llm",
                    "training.kubeflow.org/replica-type": "worker",
                    "training.kubeflow.org/replica-index": "2",
                },
                "ownerReferences": _owned("PyTorchJob", "llm"),
            },
            ("llm", "u-1", "", "2"),
            id="PyTorchJob",
        ),
        pytest.param(
            {
                "labels": {
                    "training.kubeflow.org/job-name": "llm",
                    "training.kubeflow.org/job-role": "launcher",
                    "job-name": "llm-launcher",
                    "controller-uid": "job-1",
                },
                "ownerReferences": _owned("Job", "llm-launcher", "job-1"),
            },
            ("llm", "job-1", "", ""),
            id="launcher of an MPIJob",
        ),
        pytest.param(
            {
                "labels": {"ray.io/cluster": "llm-abcde", "ray.io/group": "workers"},
                "ownerReferences": _owned("RayCluster", "llm-abcde", "ray-1"),
            },
            ("llm-abcde", "ray-1", "", ""),
            id="RayCluster",
        ),
        pytest.param(
            {
                "labels": {"ray.io/cluster": "llm-abcde", "ray.io/originated-from-cr-name": "llm"},
                "ownerReferences": _owned("RayCluster", "llm-abcde", "ray-1"),
            },
            ("llm", "ray-1", "", ""),
            id="RayJob",
        ),
        pytest.param(
            {
                "labels": {"volcano.sh/job-name": "llm", "volcano.sh/task-index": "1"},
                "annotations": {"volcano.sh/job-retry-count": "3", "volcano.sh/task-index": "1"},
                "ownerReferences": _owned("Job", "llm", "vc-1"),
            },
            ("llm", "vc-1", "3", "1"),
            id="Volcano",
        ),
        pytest.param(
            {"name": "web-12", "ownerReferences": _owned("StatefulSet", "web")},
            ("web", "u-1", "", "12"),
            id="StatefulSet",
        ),
        pytest.param(
            {
                "generateName": "api-6d4cf56db6-",
                "labels": {"pod-template-hash": "6d4cf56db6"},
                "ownerReferences": _owned("ReplicaSet", "api-6d4cf56db6"),
            },
            ("api", "u-1", "", ""),
            id="Deployment",
        ),
        pytest.param({"name": "debug-2"}, ("debug-2", "", "", ""), id="a pod by itself"),
        pytest.param({"generateName": "debug-"}, ("debug", "", "", ""), id="a generated name"),
    ],
)
def test_the_topmost_owner_that_can_be_known_is_the_submission(
    metadata: dict[str, Any], is_of: tuple[str, str, str, str]
) -> None:
    job, submission, attempt, rank = is_of
    # A pod without an owner is a submission by itself.
    assert _found(metadata) == (job, submission or "metadata.uid", attempt, rank)


def test_what_is_no_number_or_no_name_is_made_one_or_left_out() -> None:
    labels = {"job-name": "a/../b" * 60, "controller-uid": "../x", INDEX: "1e9"}
    job, submission, _, rank = _found({"labels": labels})
    assert "/" not in job
    assert len(job) == 128
    assert submission == "x"
    assert rank == ""
