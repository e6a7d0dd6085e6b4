"""The answer to an AdmissionReview. Pure, but for the look at the cluster, and the
Secret, that it is given."""

import base64
import json
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from bootseer.errors import CorruptError
from bootseer.kubernetes.webhook.plan import (
    ANNOTATIONS,
    CHECKPOINT,
    MIRROR,
    REQUIRED,
    Cluster,
    KeySecret,
    Plan,
    is_annotated,
    plan,
)
from bootseer.kubernetes.webhook.pods import POD, REVIEW

_POD_BYTES_MAX = 1024 * 1024
"""What is stored may not be larger than 1.5 MiB; a patch is no reason to refuse a pod."""


def answer(
    body: bytes, cluster: Callable[[], Cluster], keep_secret: Callable[[str, KeySecret], str]
) -> bytes:
    """The AdmissionReview that answers `body`. A pod is refused only where its own label requires
    a folder of checkpoints that it cannot have. `cluster` is asked only for pods that have an
    annotation. `keep_secret` makes a Secret in a namespace, and returns why it cannot.

    Raises: CorruptError, where `body` is no AdmissionReview.
    """
    review = REVIEW.decode(body, "the request's body")
    request = review.request
    planned, refusal = Plan(), ""
    if request.operation == "CREATE":
        planned = _planned(request.object, len(body), cluster)
        refusal = _refusal(request.object, planned)
        secret = None if refusal or request.is_dry_run else planned.secret
        if secret is not None and (problem := keep_secret(request.namespace, secret)):
            # The pod names it as optional: it starts without.
            warnings = (
                *planned.warnings,
                f"bootseer: the key of the fan-out is in the store: {problem}",
            )
            planned = replace(planned, warnings=warnings)
    response: dict[str, Any] = {"uid": request.uid, "allowed": not refusal}
    if refusal:
        response["status"] = {"code": 403, "message": refusal}
    elif planned.patch:
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
    return not _words(document, "annotations").keys().isdisjoint(ANNOTATIONS)


def _refusal(document: Any, planned: Plan) -> str:
    """Why a pod may not start; empty where it may."""
    is_required = _words(document, "labels").get(CHECKPOINT) == REQUIRED
    if not is_required or planned.has_checkpoint or MIRROR in _words(document, "annotations"):
        return ""
    why = "; ".join(planned.warnings) or f"it has no annotation {CHECKPOINT}"
    return f"the pod's label {CHECKPOINT} says {REQUIRED}, and it cannot have that folder: {why}"


def _words(document: Any, name: str) -> dict[str, Any]:
    """The labels or the annotations of an object that may be anything."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    words = metadata.get(name) if isinstance(metadata, dict) else None
    return words if isinstance(words, dict) else {}
