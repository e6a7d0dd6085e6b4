"""Calls of CRI as a kubelet makes them to containerd: images, pods and their containers.

Pods use the node's network, so that no network plug-in is needed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory

from bootseer.base.protobuf_messages import describe
from testbed.mounts.image_mounts import TIMEOUT_S

_PACKAGE = "runtime.v1"
_ID = ((1, "string", "id"),)
# Field numbers are those of k8s.io/cri-api/pkg/apis/runtime/v1. On the wire, a map of strings is a
# list of pairs.
_MESSAGES = {
    "ImageSpec": ((1, "string", "image"),),
    "Pair": ((1, "string", "key"), (2, "string", "value")),
    "NamespaceOption": ((1, "int32", "network"),),
    "SandboxSecurity": ((1, f".{_PACKAGE}.NamespaceOption", "namespace_options"),),
    "LinuxSandbox": ((2, f".{_PACKAGE}.SandboxSecurity", "security_context"),),
    "PodMetadata": (
        (1, "string", "name"),
        (2, "string", "uid"),
        (3, "string", "namespace"),
    ),
    "PodSandboxConfig": (
        (1, f".{_PACKAGE}.PodMetadata", "metadata"),
        (7, f"*.{_PACKAGE}.Pair", "annotations"),
        (8, f".{_PACKAGE}.LinuxSandbox", "linux"),
    ),
    "ContainerMetadata": ((1, "string", "name"), (2, "uint32", "attempt")),
    "ContainerConfig": (
        (1, f".{_PACKAGE}.ContainerMetadata", "metadata"),
        (2, f".{_PACKAGE}.ImageSpec", "image"),
        (3, "*string", "command"),
        (6, f"*.{_PACKAGE}.Pair", "envs"),
        (9, f"*.{_PACKAGE}.Pair", "labels"),
    ),
    "PullImageRequest": (
        (1, f".{_PACKAGE}.ImageSpec", "image"),
        (3, f".{_PACKAGE}.PodSandboxConfig", "sandbox_config"),
    ),
    "PullImageResponse": ((1, "string", "image_ref"),),
    "RemoveImageRequest": ((1, f".{_PACKAGE}.ImageSpec", "image"),),
    "RemoveImageResponse": (),
    "ListImagesRequest": (),
    "Image": ((1, "string", "id"), (2, "*string", "repo_tags")),
    "ListImagesResponse": ((1, f"*.{_PACKAGE}.Image", "images"),),
    "RunPodSandboxRequest": ((1, f".{_PACKAGE}.PodSandboxConfig", "config"),),
    "RunPodSandboxResponse": _ID,
    "CreateContainerRequest": (
        (1, "string", "pod"),
        (2, f".{_PACKAGE}.ContainerConfig", "config"),
        (3, f".{_PACKAGE}.PodSandboxConfig", "pod_config"),
    ),
    "CreateContainerResponse": _ID,
    "StartContainerRequest": _ID,
    "StartContainerResponse": (),
    "ExecSyncRequest": ((1, "string", "id"), (2, "*string", "command"), (3, "int64", "timeout")),
    "ExecSyncResponse": ((1, "bytes", "out"), (2, "bytes", "err"), (3, "int32", "code")),
    "StopPodSandboxRequest": _ID,
    "StopPodSandboxResponse": (),
    "RemovePodSandboxRequest": _ID,
    "RemovePodSandboxResponse": (),
}
_NETWORK_OF_THE_NODE = 2


def _build() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(describe(_PACKAGE, _MESSAGES, ()).SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _build()


def call_cri(socket: Path, method: str, /, **fields: Any) -> Any:
    """Call a method of one of CRI's services. Raises: grpc.RpcError."""
    service = "ImageService" if "Image" in method else "RuntimeService"
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        caller = channel.unary_unary(
            f"/{_PACKAGE}.{service}/{method}",
            request_serializer=_CLASSES[f"{method}Request"].SerializeToString,
            response_deserializer=_CLASSES[f"{method}Response"].FromString,
        )
        return caller(_CLASSES[f"{method}Request"](**fields), timeout=TIMEOUT_S)


def pod_config(name: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return CRI's description of a pod."""
    options = {"namespace_options": {"network": _NETWORK_OF_THE_NODE}}
    return {
        "metadata": {"name": name, "uid": name, "namespace": "default"},
        "annotations": _pairs(annotations or {}),
        "linux": {"security_context": options},
    }


def container_config(
    name: str,
    image: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    restart_count: int,
) -> dict[str, Any]:
    """Return CRI's description of a container of the pod with this name."""
    pod = {"name": name, "uid": f"{name}-uid", "namespace": "default"}
    return {
        "metadata": {"name": name, "attempt": restart_count},
        "image": {"image": image},
        "command": list(command),
        "envs": _pairs(variables),
        "labels": _pairs({f"io.kubernetes.pod.{key}": value for key, value in pod.items()}),
    }


def _pairs(words: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in words.items()]
