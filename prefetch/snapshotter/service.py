"""The gRPC service: each method decodes a message, calls `core` once and encodes the answer.

Called from the threads of the gRPC server.
"""

from collections.abc import Iterator
from typing import Any

import grpc

from bootseer.linux import grpc_service
from bootseer.prefetch.snapshotter.core import Snapshotter
from bootseer.prefetch.snapshotter.snapshot import Snapshot, SnapshotKind, SnapshotMount
from bootseer.prefetch.snapshotter.wire import (
    KIND_ACTIVE,
    KIND_COMMITTED,
    KIND_VIEW,
    MESSAGES,
    METHODS,
    SERVICE,
)

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
