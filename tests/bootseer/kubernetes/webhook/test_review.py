"""Answers to the questions of API servers, and to malformed ones."""

import json
from typing import Any

import pytest

from bootseer.errors import CorruptError
from bootseer.kubernetes.webhook.plan import Cluster, KeySecret, answer
from bootseer.kubernetes.webhook.pods import BODY_BYTES_MAX
from tests.bootseer.kubernetes.webhook.pod_objects import (
    CLUSTER,
    no_secret,
    pod_object,
    response_to,
    review_of,
)

REPLAY = {"bootseer.io/replay": "auto"}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_answer_has_uid_and_version_of_the_question(version: str) -> None:
    response = response_to(review_of(pod_object(REPLAY), version=version))
    assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    assert response["apiVersion"] == f"admission.k8s.io/{version}"
    assert response["allowed"] is True
    assert {one["path"] for one in response["patch"]} >= {"/spec/runtimeClassName"}
    assert "warnings" not in response


def test_the_cluster_is_not_asked_for_other_pods() -> None:
    def never() -> Cluster:
        raise AssertionError

    document = json.loads(answer(review_of(pod_object()), never, no_secret))
    assert document["response"] == {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "allowed": True,
    }


def test_warnings_are_said_to_whoever_creates_the_pod() -> None:
    response = response_to(review_of(pod_object(REPLAY)), Cluster(has_driver=True, handler=""))
    assert response["warnings"] == [
        "bootseer: not replayed: this cluster has no runtime class 'bootseer'"
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"object": {"metadata": {"annotations": REPLAY}, "spec": {"containers": 7}}}, "no pod"),
        ({"object": {"metadata": {"annotations": REPLAY}}}, "not a pod"),
        ({"object": pod_object({**REPLAY, "x": "y" * 1024 * 1024})}, "too large"),
    ],
)
def test_a_pod_that_cannot_be_changed_starts_as_it_is(change: dict[str, Any], says: str) -> None:
    response = response_to(review_of(None, **change))
    assert response["allowed"] is True
    assert "patch" not in response
    assert says.replace("no pod", "not a pod") in response["warnings"][0]


CHECKPOINT = {"bootseer.io/checkpoint": "hdfs://namenode/ckpt"}
REQUIRED = {"bootseer.io/checkpoint": "required"}
_TAKEN = {"volumeMounts": [{"name": "data", "mountPath": "/mnt/checkpoints"}]}


@pytest.mark.parametrize(
    ("annotations", "spec", "says"),
    [
        (REPLAY, {}, "no annotation"),
        (None, {}, "no annotation"),
        ({"bootseer.io/checkpoint": "off"}, {}, "no annotation"),
        ({"bootseer.io/checkpoint": "/mnt/x"}, {}, "not a URL"),
        (CHECKPOINT, {"containers": [{"name": "a"}, {"name": "b", **_TAKEN}]}, "another volume"),
        (CHECKPOINT, {"os": {"name": "windows"}}, "Windows"),
        (CHECKPOINT, {"containers": 7}, "not a pod"),
        ({**CHECKPOINT, "x": "y" * 1024 * 1024}, {}, "too large"),
    ],
)
def test_a_pod_that_requires_its_checkpoint_folder_is_refused_without(
    annotations: dict[str, str] | None, spec: dict[str, Any], says: str
) -> None:
    """The trainer would begin at step 0, and save to the node's disk."""
    pod = pod_object(annotations, REQUIRED, **spec)
    response = response_to(review_of(pod))
    assert response["allowed"] is False
    assert says in response["status"]["message"]
    assert "patch" not in response
    pod["metadata"]["labels"] = {}
    assert response_to(review_of(pod))["allowed"] is True


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_pod_that_requires_its_checkpoint_folder_gets_it(has_driver: bool) -> None:
    """On a node without a driver, the pod waits for one."""
    cluster = Cluster(has_driver=has_driver, handler="")
    response = response_to(review_of(pod_object(CHECKPOINT, REQUIRED)), cluster)
    assert response["allowed"] is True
    assert "/spec/volumes" in {one["path"] for one in response["patch"]}


def test_a_mirror_of_a_pod_that_runs_already_is_never_refused() -> None:
    mirror = {**CHECKPOINT, "kubernetes.io/config.mirror": "a1"}
    assert response_to(review_of(pod_object(mirror, REQUIRED)))["allowed"] is True


@pytest.mark.parametrize(
    "change", [{"operation": "UPDATE"}, {"object": None}, {"object": []}, {"object": "x"}]
)
def test_other_questions_are_answered_without_a_change(change: dict[str, Any]) -> None:
    response = response_to(review_of(pod_object(REPLAY), **change))
    assert response.keys() == {"uid", "allowed", "apiVersion"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"kind":"AdmissionReview"}',
        b'{"kind":"Pod","apiVersion":"v1","request":{"uid":"1"}}',
        b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":""}}',
        b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":1}}',
        b"[" * 100_000,
        b"[" + b"{}," * 300_000 + b"{}]",
        b" " * (BODY_BYTES_MAX + 1),
    ],
)
def test_what_is_no_question_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptError):
        answer(body, lambda: CLUSTER, no_secret)


FANOUT = {"bootseer.io/fanout-hosts": "auto"}


def test_a_secret_is_made_for_pods_that_are_created() -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def keep(namespace: str, secret: KeySecret) -> str:
        made.append((namespace, secret.document()))
        return ""

    response = response_to(review_of(pod_object(FANOUT)), ensure_secret=keep)
    assert "warnings" not in response
    ((namespace, secret),) = made
    assert (namespace, secret["immutable"]) == ("training", True)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["apiVersion"]) == ("Job", "train", "batch/v1")
    key = secret["stringData"]["key"]
    assert len(bytes.fromhex(key)) == 32
    assert key not in json.dumps(response)
    # A pod of which nothing comes.
    assert response_to(review_of(pod_object(FANOUT), dryRun=True))["allowed"] is True
    required = review_of(pod_object(FANOUT, REQUIRED))
    assert response_to(required)["allowed"] is False


def test_a_secret_that_cannot_be_made_is_a_warning() -> None:
    response = response_to(review_of(pod_object(FANOUT)), ensure_secret=lambda *_: "no rights")
    assert response["allowed"] is True
    assert response["warnings"] == ["bootseer: the key of the fan-out is in the store: no rights"]
    assert "patch" in response
