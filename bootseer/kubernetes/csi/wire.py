"""CSI and the kubelet's registration of plugins on the wire.

Alone knows their messages: those parts of csi.v1 (spec 1.3) and pluginregistration v1 that a driver
without a controller needs, built when this is imported. Enumerations are numbers, as on the wire.
"""

from typing import Any

from bootseer.base.protobuf_messages import LABELS, Messages, build, describe

_CSI: Messages = {
    "GetPluginInfoRequest": (),
    "GetPluginInfoResponse": ((1, "string", "name"), (2, "string", "vendor_version")),
    "GetPluginCapabilitiesRequest": (),
    # None: neither a controller nor topology.
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
"""Each method's request and response, by service."""

MESSAGES: dict[str, Any] = build(
    (describe("csi.v1", _CSI), describe("pluginregistration", _REGISTRATION))
)
"""The class of each message, by its name."""
