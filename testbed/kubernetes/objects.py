"""Objects of Kubernetes that tests apply. Pure."""

from collections.abc import Mapping
from typing import Any


def pod(
    name: str,
    image: str,
    script: str,
    *,
    node: str = "",
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a pod that runs a shell script once."""
    container = {"name": "main", "image": image, "command": ["sh", "-c", script]}
    found: dict[str, Any] = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": {"bed": "yes", "name": name},
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "containers": [container], **spec,
        },
    }  # fmt: skip
    if node:
        found["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return found
