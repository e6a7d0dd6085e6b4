"""Messages of containerd's snapshots service: `containerd.services.snapshots.v1.Snapshots`.

The classes are built when this module is imported. Field numbers are those of containerd's
api/services/snapshots/v1 and api/types.
"""

from typing import Any

from google.protobuf import empty_pb2, field_mask_pb2, timestamp_pb2

from bootseer.base.protobuf_messages import LABELS, Messages, build, describe

SERVICE = "containerd.services.snapshots.v1.Snapshots"

_PACKAGE = "containerd.services.snapshots.v1"

_TYPES: Messages = {
    "Mount": (
        (1, "string", "type"),
        (2, "string", "source"),
        (3, "string", "target"),
        (4, "*string", "options"),
    ),
}
_MESSAGES: Messages = {
    "PrepareSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "key"),
        (3, "string", "parent"),
        (4, LABELS, "labels"),
    ),
    "PrepareSnapshotResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "ViewSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "key"),
        (3, "string", "parent"),
        (4, LABELS, "labels"),
    ),
    "ViewSnapshotResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "MountsRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "MountsResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "RemoveSnapshotRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "CommitSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "name"),
        (3, "string", "key"),
        (4, LABELS, "labels"),
        (5, "string", "parent"),
    ),
    "StatSnapshotRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "Info": (
        (1, "string", "name"),
        (2, "string", "parent"),
        # An enumeration in containerd; on the wire the same.
        (3, "int32", "kind"),
        (4, ".google.protobuf.Timestamp", "created_at"),
        (5, ".google.protobuf.Timestamp", "updated_at"),
        (6, LABELS, "labels"),
    ),
    "StatSnapshotResponse": ((1, ".containerd.services.snapshots.v1.Info", "info"),),
    "UpdateSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, ".containerd.services.snapshots.v1.Info", "info"),
        (3, ".google.protobuf.FieldMask", "update_mask"),
    ),
    "UpdateSnapshotResponse": ((1, ".containerd.services.snapshots.v1.Info", "info"),),
    "ListSnapshotsRequest": ((1, "string", "snapshotter"), (2, "*string", "filters")),
    "ListSnapshotsResponse": ((1, "*.containerd.services.snapshots.v1.Info", "info"),),
    "UsageRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "UsageResponse": ((1, "int64", "size"), (2, "int64", "inodes")),
    "CleanupRequest": ((1, "string", "snapshotter"),),
}

KIND_VIEW, KIND_ACTIVE, KIND_COMMITTED = 1, 2, 3

METHODS = {
    "Prepare": ("PrepareSnapshotRequest", "PrepareSnapshotResponse"),
    "View": ("ViewSnapshotRequest", "ViewSnapshotResponse"),
    "Mounts": ("MountsRequest", "MountsResponse"),
    "Commit": ("CommitSnapshotRequest", "Empty"),
    "Remove": ("RemoveSnapshotRequest", "Empty"),
    "Stat": ("StatSnapshotRequest", "StatSnapshotResponse"),
    "Update": ("UpdateSnapshotRequest", "UpdateSnapshotResponse"),
    "List": ("ListSnapshotsRequest", "ListSnapshotsResponse"),
    "Usage": ("UsageRequest", "UsageResponse"),
    "Cleanup": ("CleanupRequest", "Empty"),
}
"""Method -> request and response; `List` answers with a stream of responses."""


_KNOWN = (empty_pb2, field_mask_pb2, timestamp_pb2)
_TYPES_FILE = describe("containerd.types", _TYPES)
_IMPORTS = (_TYPES_FILE.name, *(module.DESCRIPTOR.name for module in _KNOWN))

MESSAGES: dict[str, Any] = {
    **build((_TYPES_FILE, describe(_PACKAGE, _MESSAGES, _IMPORTS)), _KNOWN),
    "Empty": empty_pb2.Empty,
}
"""Name of a message -> its class."""
