"""The gRPC service: each method decodes a message, calls `core` once and encodes the answer.

The service is `containerd.services.snapshots.v1.Snapshots`; field numbers are those of containerd's
api/services/snapshots/v1 and api/types. Called from the threads of the gRPC server.
"""

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import empty_pb2, field_mask_pb2, timestamp_pb2

from bootseer.base.protobuf_messages import LABELS, Messages, build, describe
from bootseer.linux import grpc_service
from bootseer.prefetch.snapshotter.core import Snapshotter
from bootseer.prefetch.snapshotter.snapshot import Snapshot, SnapshotKind, SnapshotMount

# ---- messages, built when this module is imported -----------------------------------------------

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


# ---- methods ------------------------------------------------------------------------------------

_KINDS = {
    SnapshotKind.VIEW: KIND_VIEW,
    SnapshotKind.ACTIVE: KIND_ACTIVE,
    SnapshotKind.COMMITTED: KIND_COMMITTED,
}
_INFOS_PER_MESSAGE = 100


def handler_of(snapshotter: Snapshotter) -> grpc.GenericRpcHandler:
    """Return the handler with which a gRPC server offers `snapshotter`."""
    methods = _Methods(snapshotter)
    implementation = {name: getattr(methods, name.lower()) for name in METHODS}
    return grpc_service.handler_of(SERVICE, METHODS, MESSAGES, implementation, streaming=["List"])


class _Methods:
    def __init__(self, snapshotter: Snapshotter) -> None:
        self._snapshotter = snapshotter

    def prepare(self, request: Any) -> Any:
        mounts = self._snapshotter.prepare(request.key, request.parent, dict(request.labels))
        return MESSAGES["PrepareSnapshotResponse"](mounts=[_mount(mount) for mount in mounts])

    def view(self, request: Any) -> Any:
        mounts = self._snapshotter.view(request.key, request.parent, dict(request.labels))
        return MESSAGES["ViewSnapshotResponse"](mounts=[_mount(mount) for mount in mounts])

    def mounts(self, request: Any) -> Any:
        mounts = self._snapshotter.mounts(request.key)
        return MESSAGES["MountsResponse"](mounts=[_mount(mount) for mount in mounts])

    def commit(self, request: Any) -> Any:
        self._snapshotter.commit(request.name, request.key, request.parent, dict(request.labels))
        return MESSAGES["Empty"]()

    def remove(self, request: Any) -> Any:
        self._snapshotter.remove(request.key)
        return MESSAGES["Empty"]()

    def stat(self, request: Any) -> Any:
        return MESSAGES["StatSnapshotResponse"](info=_info(self._snapshotter.stat(request.key)))

    def update(self, request: Any) -> Any:
        info = request.info
        paths = list(request.update_mask.paths)
        updated = self._snapshotter.update(info.name, dict(info.labels), paths)
        return MESSAGES["UpdateSnapshotResponse"](info=_info(updated))

    def list(self, request: Any) -> Iterator[Any]:
        infos = [_info(found) for found in self._snapshotter.list(list(request.filters))]
        starts = range(0, len(infos), _INFOS_PER_MESSAGE)
        answer = MESSAGES["ListSnapshotsResponse"]
        return (answer(info=infos[start : start + _INFOS_PER_MESSAGE]) for start in starts)

    def usage(self, request: Any) -> Any:
        usage = self._snapshotter.usage(request.key)
        return MESSAGES["UsageResponse"](size=usage.size_bytes, inodes=usage.inode_count)

    def cleanup(self, request: Any) -> Any:
        self._snapshotter.cleanup()
        return MESSAGES["Empty"]()


def _mount(mount: SnapshotMount) -> Any:
    return MESSAGES["Mount"](type=mount.kind, source=mount.source, options=mount.options)


def _info(snapshot: Snapshot) -> Any:
    info = MESSAGES["Info"](
        name=snapshot.key,
        parent=snapshot.parent,
        kind=_KINDS[snapshot.kind],
        labels=dict(snapshot.labels),
    )
    for field, time_ns in (
        (info.created_at, snapshot.created_ns),
        (info.updated_at, snapshot.updated_ns),
    ):
        field.seconds, field.nanos = divmod(time_ns, 10**9)
    return info
