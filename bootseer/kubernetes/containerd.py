"""Client of containerd's socket: plugins, and CRI as a kubelet speaks it. Thread-safe.

Every call has a deadline. Values of a container's variables may be secrets: only `pod_stages` reads
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.base.protobuf_messages import LABELS, Messages, build, describe
from bootseer.errors import UnsupportedError
from bootseer.linux.grpc_service import ask

_CRI, _INTROSPECTION = "runtime.v1", "containerd.services.introspection.v1"
# Field numbers are those of k8s.io/cri-api and of containerd's api/services/introspection/v1.
_FILES: dict[str, Messages] = {
    _CRI: {
        "StatusRequest": ((1, "bool", "verbose"),),
        "StatusResponse": ((2, LABELS, "info"),),
        "ListPodSandboxRequest": (),
        "ListPodSandboxResponse": ((1, f"*.{_CRI}.PodSandbox", "items"),),
        "PodSandbox": ((1, "string", "id"), (7, "string", "runtime_handler")),
        "ContainerStatusRequest": ((1, "string", "id"), (2, "bool", "verbose")),
        "ContainerStatusResponse": (
            (1, f".{_CRI}.ContainerStatus", "status"),
            (2, LABELS, "info"),
        ),
        "ContainerStatus": ((2, f".{_CRI}.ContainerMetadata", "metadata"), (12, LABELS, "labels")),
        "ContainerMetadata": ((1, "string", "name"), (2, "uint32", "attempt")),
    },
    _INTROSPECTION: {
        "PluginsRequest": ((1, "*string", "filters"),),
        "PluginsResponse": ((1, f"*.{_INTROSPECTION}.Plugin", "plugins"),),
        "Plugin": ((1, "string", "type"), (2, "string", "id"), (5, LABELS, "exports")),
    },
}
_INFO_BYTES_MAX = 4 * 1024 * 1024
"""Largest message that gRPC accepts."""


class _Variable(Struct, frozen=True):
    key: str = ""
    value: str = ""


class _Config(Struct, frozen=True):
    envs: tuple[_Variable, ...] = ()


class _Info(Struct, frozen=True):
    config: _Config = _Config()


_INFO: DocumentFormat[_Info] = DocumentFormat(
    type=_Info, what="a container's info", size_max=_INFO_BYTES_MAX, is_foreign=True
)


class _Containerd(Struct, frozen=True):
    runtimes: dict[str, Any] = {}


class _Running(Struct, frozen=True):
    containerd: _Containerd | None = None


_RUNNING: DocumentFormat[_Running] = DocumentFormat(
    type=_Running,
    what="a runtime's configuration",
    size_max=_INFO_BYTES_MAX,
    is_foreign=True,
)


class CriContainer(Struct, frozen=True):
    """Container of a pod, as CRI shows it."""

    name: str
    restart_count: int
    labels: Mapping[str, str]
    variables: Mapping[str, str]


def container(address: Path, identity: str) -> CriContainer:
    """Return the container with this id.

    Raises: NotFoundError if containerd does not know the container (yet); CorruptError,
        UnavailableError.
    """
    found = _ask(address, f"{_CRI}.RuntimeService", "ContainerStatus", id=identity, verbose=True)
    info = _INFO.decode(found.info.get("info", "{}").encode(), "CRI's info about a container")
    status = found.status
    return CriContainer(
        name=status.metadata.name,
        restart_count=status.metadata.attempt,
        labels=dict(status.labels),
        variables={one.key: one.value for one in info.config.envs},
    )


def runtime_handlers(address: Path) -> set[str]:
    """Return the runtime handlers of all pods, running or not."""
    found = _ask(address, f"{_CRI}.RuntimeService", "ListPodSandbox")
    return {one.runtime_handler for one in found.items}


def runtimes(address: Path) -> dict[str, Any]:
    """Return the runtimes that containerd runs with, by name.

    Raises: UnsupportedError if the socket is another runtime's; CorruptError, UnavailableError.
    """
    status = _ask(address, f"{_CRI}.RuntimeService", "Status", verbose=True)
    config = status.info.get("config", "{}").encode()
    containerd = _RUNNING.decode(config, f"the configuration that {address} reports").containerd
    if containerd is None:
        raise UnsupportedError(
            f"{address} is not containerd's socket (CRI-O reports no containerd runtimes): name "
            "containerd's (--socket, containerd.socket)"
        )
    return containerd.runtimes


def plugin_address(address: Path, name: str) -> str:
    """Return the address of the proxy plugin of this name, or "" if there is none.

    Raises: UnavailableError.
    """
    plugins = _ask(address, f"{_INTROSPECTION}.Introspection", "Plugins", filters=[f"id=={name}"])
    return next((one.exports.get("address", "") for one in plugins.plugins), "")


def _ask(address: Path, service: str, method: str, **fields: Any) -> Any:
    question = _CLASSES[f"{method}Request"](**fields)
    return ask(address, f"/{service}/{method}", question, _CLASSES[f"{method}Response"])


_CLASSES = build(describe(package, messages) for package, messages in _FILES.items())
