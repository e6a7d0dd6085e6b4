"""gRPC services of CSI and of the kubelet's plugin registration, as adapters to `Driver`.

The messages are those of csi.v1 (spec 1.3) and pluginregistration v1 that a driver without a
controller needs. They are built at import; enumerations are numbers, as on the wire. The threads of
the gRPC server call the handlers.
"""

import logging
from pathlib import Path
from typing import Any

import grpc

from bootseer import __version__
from bootseer.base.protobuf_messages import LABELS, Messages, build, describe
from bootseer.errors import InvalidInputError
from bootseer.kubernetes.csi.driver import NAME, Driver, PublishRequest
from bootseer.linux import grpc_service

_CSI: Messages = {
    "GetPluginInfoRequest": (),
    "GetPluginInfoResponse": ((1, "string", "name"), (2, "string", "vendor_version")),
    "GetPluginCapabilitiesRequest": (),
    # No capabilities: neither a controller nor topology.
    "GetPluginCapabilitiesResponse": (),
    "ProbeRequest": (),
    # google.protobuf.BoolValue.
    "BoolValue": ((1, "bool", "value"),),
    "ProbeResponse": ((1, ".csi.v1.BoolValue", "ready"),),
    "BlockVolume": (),
    "MountVolume": ((1, "string", "fs_type"), (2, "*string", "mount_flags")),
    "AccessMode": ((1, "int32", "mode"),),
    "VolumeCapability": (
        (1, ".csi.v1.BlockVolume", "block"),
        (2, ".csi.v1.MountVolume", "mount"),
        (3, ".csi.v1.AccessMode", "access_mode"),
    ),
    "NodePublishVolumeRequest": (
        (1, "string", "volume_id"),
        (4, "string", "target_path"),
        (5, ".csi.v1.VolumeCapability", "volume_capability"),
        (6, "bool", "readonly"),
        (7, LABELS, "secrets"),
        (8, LABELS, "volume_context"),
    ),
    "NodePublishVolumeResponse": (),
    "NodeUnpublishVolumeRequest": ((1, "string", "volume_id"), (2, "string", "target_path")),
    "NodeUnpublishVolumeResponse": (),
    "NodeGetVolumeStatsRequest": ((1, "string", "volume_id"), (2, "string", "volume_path")),
    "VolumeUsage": (
        (1, "int64", "available"),
        (2, "int64", "total"),
        (3, "int64", "used"),
        (4, "int32", "unit"),
    ),
    "VolumeCondition": ((1, "bool", "abnormal"), (2, "string", "message")),
    "NodeGetVolumeStatsResponse": (
        (1, "*.csi.v1.VolumeUsage", "usage"),
        (2, ".csi.v1.VolumeCondition", "volume_condition"),
    ),
    "RPC": ((1, "int32", "type"),),
    "NodeServiceCapability": ((1, ".csi.v1.RPC", "rpc"),),
    "NodeGetCapabilitiesRequest": (),
    "NodeGetCapabilitiesResponse": ((1, "*.csi.v1.NodeServiceCapability", "capabilities"),),
    "NodeGetInfoRequest": (),
    "NodeGetInfoResponse": ((1, "string", "node_id"), (2, "int64", "max_volumes_per_node")),
}
_REGISTRATION: Messages = {
    "InfoRequest": (),
    "PluginInfo": (
        (1, "string", "type"),
        (2, "string", "name"),
        (3, "string", "endpoint"),
        (4, "*string", "supported_versions"),
    ),
    "RegistrationStatus": ((1, "bool", "plugin_registered"), (2, "string", "error")),
    "RegistrationStatusResponse": (),
}

UNIT_BYTES, UNIT_INODES = 1, 2
GET_VOLUME_STATS, VOLUME_CONDITION = 2, 4

IDENTITY, NODE, REGISTRATION = "csi.v1.Identity", "csi.v1.Node", "pluginregistration.Registration"
_NAMES = {
    IDENTITY: ("GetPluginInfo", "GetPluginCapabilities", "Probe"),
    NODE: (
        *("NodePublishVolume", "NodeUnpublishVolume", "NodeGetVolumeStats"),
        *("NodeGetCapabilities", "NodeGetInfo"),
    ),
}
METHODS = {
    **{
        service: {name: (f"{name}Request", f"{name}Response") for name in names}
        for service, names in _NAMES.items()
    },
    REGISTRATION: {
        "GetInfo": ("InfoRequest", "PluginInfo"),
        "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse"),
    },
}
"""Request and response of each method, by service."""

MESSAGES: dict[str, Any] = build(
    (describe("csi.v1", _CSI), describe("pluginregistration", _REGISTRATION))
)
"""Message classes by name."""


_log = logging.getLogger(__name__)


def handlers_of(driver: Driver, endpoint: Path) -> list[grpc.GenericRpcHandler]:
    """Return the gRPC handlers of a driver that listens on the socket `endpoint`."""
    methods = {**_identity(), **_node(driver), **_registration(endpoint)}
    return [
        grpc_service.handler_of(
            service, METHODS[service], MESSAGES, {name: methods[name] for name in METHODS[service]}
        )
        for service in (IDENTITY, NODE, REGISTRATION)
    ]


def _identity() -> dict[str, Any]:
    def info(request: Any) -> Any:
        return MESSAGES["GetPluginInfoResponse"](name=NAME, vendor_version=__version__)

    def probe(request: Any) -> Any:
        return MESSAGES["ProbeResponse"](ready={"value": True})

    return {
        "GetPluginInfo": info,
        "GetPluginCapabilities": lambda request: MESSAGES["GetPluginCapabilitiesResponse"](),
        "Probe": probe,
    }


def _node(driver: Driver) -> dict[str, Any]:
    def publish(request: Any) -> Any:
        _check(request, "volume_id", "target_path")
        if not request.HasField("volume_capability"):
            raise InvalidInputError("the call has no volume capability")
        capability = request.volume_capability
        if capability.HasField("block"):
            raise InvalidInputError("a volume of Bootseer is a file system, not a block device")
        if capability.mount.mount_flags:
            raise InvalidInputError(
                "the volume has mount options; write them as attributes of the volume instead"
            )
        driver.publish(
            PublishRequest(
                request.volume_id,
                request.target_path,
                dict(request.volume_context),
                dict(request.secrets),
                request.readonly,
            )
        )
        return MESSAGES["NodePublishVolumeResponse"]()

    def unpublish(request: Any) -> Any:
        _check(request, "volume_id", "target_path")
        driver.unpublish(request.volume_id, request.target_path)
        return MESSAGES["NodeUnpublishVolumeResponse"]()

    def stats(request: Any) -> Any:
        _check(request, "volume_id", "volume_path")
        usage = driver.usage(request.volume_id, request.volume_path)
        answer = MESSAGES["NodeGetVolumeStatsResponse"]()
        answer.volume_condition.abnormal = bool(usage.problem)
        answer.volume_condition.message = usage.problem or "the volume answers"
        for unit, available, total in (
            (UNIT_BYTES, usage.available_bytes, usage.total_bytes),
            (UNIT_INODES, usage.available_inodes, usage.total_inodes),
        ):
            answer.usage.add(
                available=available, total=total, used=max(total - available, 0), unit=unit
            )
        return answer

    def capabilities(request: Any) -> Any:
        return MESSAGES["NodeGetCapabilitiesResponse"](
            capabilities=[{"rpc": {"type": kind}} for kind in (GET_VOLUME_STATS, VOLUME_CONDITION)]
        )

    return {
        "NodePublishVolume": publish,
        "NodeUnpublishVolume": unpublish,
        "NodeGetVolumeStats": stats,
        "NodeGetCapabilities": capabilities,
        "NodeGetInfo": lambda request: MESSAGES["NodeGetInfoResponse"](
            node_id=driver.settings.node
        ),
    }


def _registration(endpoint: Path) -> dict[str, Any]:
    def info(request: Any) -> Any:
        return MESSAGES["PluginInfo"](
            type="CSIPlugin", name=NAME, endpoint=str(endpoint), supported_versions=["1.0.0"]
        )

    def registered(request: Any) -> Any:
        if request.plugin_registered:
            _log.info("the kubelet has registered the driver")
        else:
            _log.warning("the kubelet refuses to register the driver: %s", request.error[:500])
        return MESSAGES["RegistrationStatusResponse"]()

    return {"GetInfo": info, "NotifyRegistrationStatus": registered}


def _check(request: Any, *names: str) -> None:
    for name in names:
        if not getattr(request, name):
            raise InvalidInputError(f"the call has no {name}")
