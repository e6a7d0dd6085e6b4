"""Pods as API servers send them, and the webhook's plans and patches of them."""

import base64
import json
from collections.abc import Callable
from typing import Any

from bootseer.kubernetes.webhook.plan import Cluster, KeySecret, PodPlan, answer, plan
from bootseer.kubernetes.webhook.pods import POD
from tests.bootseer.kubernetes.webhook.json_patch import applied

CLUSTER = Cluster(has_driver=True, handler="bootseer-handler", store_url="hdfs://namenode/store")
JOB_UID = "0d0c5a9e-5b8e-4a43-8a22-9b9f7a3f1c11"


def pod_object(
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    owner: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod, by default of a Job."""
    owner = owner or {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": JOB_UID}
    labels = {"controller-uid": JOB_UID, "job-name": "train"} if labels is None else labels
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "train-",
            "creationTimestamp": None,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {
            "containers": [{"name": "trainer", "image": "trainer", "resources": {}}],
            "restartPolicy": "Never",
            **spec,
        },
        "status": {},
    }


def planned(document: dict[str, Any], cluster: Cluster = CLUSTER) -> PodPlan:
    """Return the plan for a pod in JSON form."""
    return plan(POD.decode(json.dumps(document).encode(), "a pod"), cluster)


def patched(document: dict[str, Any], cluster: Cluster = CLUSTER) -> dict[str, Any]:
    """Return the pod after its patch."""
    found: dict[str, Any] = applied(document, list(planned(document, cluster).patch))
    return found


def variables(document: dict[str, Any], kind: str = "containers", place: int = 0) -> dict[str, Any]:
    """Return the environment variables of a container: values, or the names of fields."""
    return {
        one["name"]: one.get("value", one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
        for one in document["spec"][kind][place].get("env") or ()
    }


def review_of(document: Any, *, version: str = "v1", **request: Any) -> bytes:
    """Return the question of an API server about a pod."""
    return json.dumps(
        {
            "kind": "AdmissionReview",
            "apiVersion": f"admission.k8s.io/{version}",
            "request": {
                "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
                "requestResource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": "training",
                "operation": "CREATE",
                "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
                "object": document,
                "oldObject": None,
                "dryRun": False,
                "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
                **request,
            },
        }
    ).encode()


def no_secret(namespace: str, secret: KeySecret) -> str:
    """Fail: no pod of the test may ask for a Secret."""
    raise AssertionError(namespace, secret.name)


def response_to(
    body: bytes,
    cluster: Cluster = CLUSTER,
    ensure_secret: Callable[[str, KeySecret], str] = no_secret,
) -> dict[str, Any]:
    """Return the webhook's answer, its patch decoded."""
    document = json.loads(answer(body, lambda: cluster, ensure_secret))
    response: dict[str, Any] = document["response"]
    if "patch" in response:
        assert response["patchType"] == "JSONPatch"
        response["patch"] = json.loads(base64.b64decode(response["patch"]))
    return {**response, "apiVersion": document["apiVersion"]}
