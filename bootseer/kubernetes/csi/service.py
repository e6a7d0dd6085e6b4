"""The gRPC services: each method takes a message apart, calls the driver once, and puts one
together. Called from the threads of the gRPC server.
"""

import logging
from pathlib import Path
from typing import Any

import grpc

from bootseer import __version__
from bootseer.errors import InvalidInputError
from bootseer.kubernetes.csi.driver import NAME, Driver, Request
from bootseer.kubernetes.csi.wire import (
    GET_VOLUME_STATS,
    IDENTITY,
    MESSAGES,
    METHODS,
    NODE,
    REGISTRATION,
    UNIT_BYTES,
    UNIT_INODES,
    VOLUME_CONDITION,
)
from bootseer.linux import grpc_service

_log = logging.getLogger(__name__)


def handlers_of(driver: Driver, endpoint: Path) -> list[grpc.GenericRpcHandler]:
    """What a gRPC server needs to offer `driver` on the socket `endpoint`, and to register it."""
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
            raise InvalidInputError("a volume of Bootseer is a file system, and no block device")
        if capability.mount.mount_flags:
            raise InvalidInputError(
                "the volume has mount options, which this driver takes as attributes of the volume"
            )
        driver.publish(
            Request(
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
            _log.warning("the kubelet does not register the driver: %s", request.error[:500])
        return MESSAGES["RegistrationStatusResponse"]()

    return {"GetInfo": info, "NotifyRegistrationStatus": registered}


def _check(request: Any, *names: str) -> None:
    for name in names:
        if not getattr(request, name):
            raise InvalidInputError(f"the call has no {name}")
