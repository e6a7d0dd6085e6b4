"""The answer to an AdmissionReview. Pure, but for the look at the cluster that it is given."""

import base64
import json
from collections.abc import Callable
from typing import Any

from bootseer.errors import CorruptError
from bootseer.kubernetes.webhook.plan import ANNOTATIONS, Cluster, Plan, is_annotated, plan
from bootseer.kubernetes.webhook.pods import POD, REVIEW

_POD_BYTES_MAX = 1024 * 1024
"""What is stored may not be larger than 1.5 MiB; a patch is no reason to refuse a pod."""


def answer(body: bytes, cluster: Callable[[], Cluster]) -> bytes:
    """The AdmissionReview that answers `body`. The pod is always allowed. `cluster` is asked only
    for pods that have an annotation.

    Raises: CorruptError, where `body` is no AdmissionReview.
    """
    review = REVIEW.decode(body, "the request's body")
    request = review.request
    planned = Plan()
    if request.operation == "CREATE":
        planned = _planned(request.object, len(body), cluster)
    response: dict[str, Any] = {"uid": request.uid, "allowed": True}
    if planned.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(planned.patch).encode()).decode()
    if planned.warnings:
        response["warnings"] = planned.warnings
    document = {"apiVersion": review.api_version, "kind": "AdmissionReview", "response": response}
    return json.dumps(document).encode()


def _planned(document: Any, size_bytes: int, cluster: Callable[[], Cluster]) -> Plan:
    if not _asks(document):
        return Plan()
    if size_bytes > _POD_BYTES_MAX:
        return Plan(warnings=("bootseer: the pod is too large for a change; it starts as it is",))
    try:
        pod = POD.convert(document, "the request's object")
    except CorruptError as error:
        return Plan(warnings=(f"bootseer: {error}; it starts as it is",))
    return plan(pod, cluster()) if is_annotated(pod) else Plan()


def _asks(document: Any) -> bool:
    """Whether the object has one of our annotations: others are not even decoded."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    return isinstance(annotations, dict) and not annotations.keys().isdisjoint(ANNOTATIONS)
