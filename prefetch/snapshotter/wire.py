"""containerd's snapshots service on the wire: `containerd.services.snapshots.v1.Snapshots`.

Alone knows its messages. They are described here and built when imported, in a pool of their own:
so no generated code has to fit the installed protobuf, and no other user of containerd's messages
in one process is disturbed. Field numbers are those of containerd's api/services/snapshots/v1 and
api/types; they never change, and unknown fields are skipped.
"""

from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    timestamp_pb2,
)

SERVICE = "containerd.services.snapshots.v1.Snapshots"

_Field = descriptor_pb2.FieldDescriptorProto
_LABELS = "map<string, string>"
_PACKAGE = "containerd.services.snapshots.v1"

# (number, type, name) of each field; "*" before a type: repeated.
_TYPES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Mount": (
        (1, "string", "type"),
        (2, "string", "source"),
        (3, "string", "target"),
        (4, "*string", "options"),
    ),
}
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "PrepareSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "key"),
        (3, "string", "parent"),
        (4, _LABELS, "labels"),
    ),
    "PrepareSnapshotResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "ViewSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "key"),
        (3, "string", "parent"),
        (4, _LABELS, "labels"),
    ),
    "ViewSnapshotResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "MountsRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "MountsResponse": ((1, "*.containerd.types.Mount", "mounts"),),
    "RemoveSnapshotRequest": ((1, "string", "snapshotter"), (2, "string", "key")),
    "CommitSnapshotRequest": (
        (1, "string", "snapshotter"),
        (2, "string", "name"),
        (3, "string", "key"),
        (4, _LABELS, "labels"),
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
        (6, _LABELS, "labels"),
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
"""Each method's request and response; `List` answers with a stream of responses."""


def describe(
    package: str, messages: dict[str, tuple[tuple[int, str, str], ...]], imports: tuple[str, ...]
) -> descriptor_pb2.FileDescriptorProto:
    """The messages as protobuf describes a file of them."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"bootseer/{package}.proto", package=package, syntax="proto3", dependency=imports
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, kind, field_name in fields:
            _add_field(message, f".{package}.{name}", number, kind, field_name)
    return file


def _add_field(
    message: descriptor_pb2.DescriptorProto, path: str, number: int, kind: str, name: str
) -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind == _LABELS:
        entry = message.nested_type.add(name="LabelsEntry")
        entry.options.map_entry = True
        _add_field(entry, path, 1, "string", "key")
        _add_field(entry, path, 2, "string", "value")
        kind = f"*{path}.LabelsEntry"
    if kind.startswith("*"):
        field.label = _Field.LABEL_REPEATED
        kind = kind[1:]
    if kind.startswith("."):
        field.type, field.type_name = _Field.TYPE_MESSAGE, kind
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")


def _build() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    known = (empty_pb2, field_mask_pb2, timestamp_pb2)
    for module in known:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    types = describe("containerd.types", _TYPES, ())
    imports = (types.name, *(module.DESCRIPTOR.name for module in known))
    for file in (types, describe(_PACKAGE, _MESSAGES, imports)):
        pool.AddSerializedFile(file.SerializeToString())
    names = {name: f"{_PACKAGE}.{name}" for name in _MESSAGES}
    names |= {"Mount": "containerd.types.Mount", "Empty": "google.protobuf.Empty"}
    return {
        short: message_factory.GetMessageClass(pool.FindMessageTypeByName(full))
        for short, full in names.items()
    }


MESSAGES: dict[str, Any] = _build()
"""The class of each message, by its name."""
