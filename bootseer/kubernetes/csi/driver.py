"""CSI driver of a node: publishes volumes, keeps a record of each, and repairs those that break.

Everything that must outlive this process is in records, in mounts, or in servers, which are other
processes. A record is a file, written before anything is mounted for its volume and removed after
everything is unmounted. Records do not outlive a reboot: nothing is mounted then, and the kubelet
publishes again the volumes that it needs. Locks are taken in this order: target, checkpoint
directory. Thread-safe.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.base.documents import DocumentFormat
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    from_oserror,
)
from bootseer.fanout.local import fanout_address
from bootseer.kubernetes.csi.attributes import CheckpointVolume, Volume, check_secrets, parse_volume
from bootseer.kubernetes.csi.fanout import join_start
from bootseer.kubernetes.csi.volumes import (
    CheckpointServers,
    VolumeTrees,
    bind,
    checked_target,
    free_target,
    make_target,
    minor_at,
    tree_key,
    usage_of,
)
from bootseer.kubernetes.pod_stages import pod_timeline, start_of_volume
from bootseer.linux.private_files import private_directory, read_private_file, write_private_file
from bootseer.prefetch.snapshotter.snapshot import TreeKey
from bootseer.served.processes import SPAWNER
from bootseer.served.spawner import is_answering
from bootseer.settings.config import Settings


class VolumeRecord(Struct, frozen=True):
    """Record of a published volume."""

    volume_id: str
    target: str
    """Path that the kubelet binds into the pod's containers."""
    volume: Volume
    is_read_only: bool
    backing: str = field(default="", name="behind")
    """Mount point of the checkpoint server, or digest of the tree; empty until it is known."""
    workload: str = ""
    has_secrets: bool = False
    """Whether the volume needs the pod's secrets, which are not kept: it cannot be repaired."""
    device_minor: int = 0
    """Minor device number of the server's mount that is bound to the target."""

    @property
    def tree_key(self) -> TreeKey:
        """Key of the volume's served tree."""
        return tree_key(self.volume, self.backing, self.workload)


_FORM: DocumentFormat[VolumeRecord] = DocumentFormat(
    type=VolumeRecord,
    what="a record of a published volume",
    kind="bootseer-volume",
    version=1,
    size_max=256 * 1024,
    kind_member="record",
)


class VolumeRecords:
    """Records of volumes, one file each in a private directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = private_directory(folder)

    def read(self, target: str) -> VolumeRecord | None:
        """Return the record of the volume at `target`, or None."""
        return read_private_file(self._path(target), _FORM)

    def write(self, record: VolumeRecord) -> None:
        """Write or replace the record of a target."""
        try:
            write_private_file(self._path(record.target), _FORM.encode(record))
        except OSError as error:
            raise from_oserror(
                error, f"write the record of the volume at {record.target}"
            ) from error

    def remove(self, target: str) -> None:
        """Remove the record of a target. Idempotent."""
        try:
            self._path(target).unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror(error, f"remove the record of the volume at {target}") from error

    def all(self) -> Iterator[VolumeRecord]:
        """Yield every record; skip unreadable ones."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                record = read_private_file(path, _FORM)
                if record is not None and path == self._path(record.target):
                    yield record

    def _path(self, target: str) -> Path:
        return self._folder / f"{hashlib.sha256(target.encode()).hexdigest()}.json"


_log = logging.getLogger(__name__)

NAME = "csi.bootseer.io"
_LOCK_S = 5.0
"""Longest wait for another call of the same volume; then the call fails and the kubelet retries."""
_PUBLISHES_MAX = 12
"""Most publishes at a time. Each holds one of the gRPC server's 16 threads while a registry or a
storage answers; the others stay free for unpublishing, statistics and probes."""
_REPAIR_EVERY_S = 10.0
_LINGER_S = 60.0
_END_S = 5.0
_ID_CHARS_MAX = 1024


class PublishRequest(Struct, frozen=True):
    """Kubelet's request to publish a volume."""

    volume_id: str
    target: str
    context: Mapping[str, str]
    secrets: Mapping[str, str]
    is_read_only: bool


class VolumeUsage(Struct, frozen=True):
    """Size and free space of a volume, or a problem."""

    available_bytes: int = 0
    total_bytes: int = 0
    available_inodes: int = 0
    total_inodes: int = 0
    problem: str = ""


class Driver:
    """The volumes of one node."""

    def __init__(
        self,
        settings: Settings,
        kubelet_dir: Path,
        sources: Sequence[str],
        fanout_address: str = "",
    ) -> None:
        """Make the driver of a node.

        Args:
            settings: Settings of the node.
            kubelet_dir: The kubelet's root directory.
            sources: URLs below which checkpoint folders may be. Empty: any remote URL.
            fanout_address: Address at which other nodes reach this one. Empty: volumes take no
                part in a fan-out.

        Raises: BootseerError.
        """
        self.settings = settings
        self._fanout_address = fanout_address
        self._kubelet_dir = kubelet_dir
        self._sources = tuple(sources)
        folder = kubelet_dir / "plugins" / NAME
        # run_dir is cleared at boot. A volume mounted again for a pod from before a reboot would
        # stay forever: Kubernetes 1.20 forgets inline volumes at a reboot.
        self._records = VolumeRecords(settings.run_dir / "volumes")
        self._trees = VolumeTrees(settings, folder)
        self._checkpoints = CheckpointServers(settings, folder / "checkpoints")
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._publishes = threading.BoundedSemaphore(_PUBLISHES_MAX)
        self._closing = threading.Event()
        self._repairer = threading.Thread(
            target=self._repair_until_closed, name="repair", daemon=True
        )

    def start(self) -> None:
        """Start the thread that repairs volumes."""
        self._repairer.start()

    def close(self) -> None:
        """Stop the repair thread. Volumes stay mounted, for their pods and the next driver."""
        self._closing.set()
        if self._repairer.is_alive():
            self._repairer.join(_END_S)

    # ---- operations -----------------------------------------------------------------------------

    def publish(self, request: PublishRequest) -> None:
        """Mount a volume at its target. Idempotent. After an error nothing is mounted.

        Raises: InvalidInputError, PermissionDeniedError if the volume is not allowed;
            AlreadyExistsError if another volume is at the target; NotFoundError, UnavailableError
            and other BootseerErrors if the volume cannot be mounted now.
        """
        _check_id(request.volume_id)
        target = checked_target(self._kubelet_dir, request.target)
        volume = parse_volume(request.context, self._sources)
        secrets = check_secrets(volume, request.secrets)
        record = VolumeRecord(
            request.volume_id,
            request.target,
            volume,
            request.is_read_only,
            has_secrets=bool(secrets),
        )
        if not isinstance(volume, CheckpointVolume):
            record = replace(record, workload=volume.workload or self.settings.workload)
        with self._admitted(), self._locked(request.target):
            before = self._records.read(request.target)
            if before is not None:
                if replace(before, backing="", device_minor=0) != record:
                    raise AlreadyExistsError(
                        f"another volume, {before.volume_id}, is published at {target}"
                    )
                if minor_at(target) is not None and self._is_served(before):
                    return
            kind = type(volume).__name__.removesuffix("Volume").lower()
            with (
                # The directory of a target is named after the volume in the pod.
                pod_timeline(
                    self.settings, start_of_volume(request.context), target.parent.name
                ) as timeline,
                timeline.span(f"{kind} volume") if timeline else contextlib.nullcontext(),
            ):
                settings = join_start(self.settings, request.context, self._fanout_address)
                self._publish(settings, record, target, secrets, before)

    def unpublish(self, volume_id: str, target: str) -> None:
        """Unmount a volume from its target. Idempotent. After an error the volume stays mounted.

        Raises: InvalidInputError; UnavailableError, BusyError while files are being written or
            the volume is in use.
        """
        _check_id(volume_id)
        path = checked_target(self._kubelet_dir, target)
        with self._locked(target):
            record = self._records.read(target)
            if record is None or not isinstance(record.volume, CheckpointVolume):
                free_target(path)
                self._records.remove(target)
                return
            directory = Path(record.backing) if record.backing else None
            if directory is not None:
                self._checkpoints.await_written(directory, is_shared=self._is_shared(record))
            with self._locked(record.backing):
                free_target(path)
                if directory is not None and not self._is_shared(record):
                    # If this fails, the record stays and the kubelet asks again.
                    try:
                        self._checkpoints.unmount(directory)
                    except CorruptError:
                        # Reported once: the kubelet's next call must succeed.
                        self._records.remove(target)
                        raise
                self._records.remove(target)

    def usage(self, volume_id: str, target: str) -> VolumeUsage:
        """Return the size and free space of a volume.

        Raises: NotFoundError if the volume is not published at `target`.
        """
        path = Path(target)
        record = self._records.read(target)
        if record is None or record.volume_id != volume_id:
            raise NotFoundError(f"no volume {volume_id[:200]!r} is published at {target[:200]}")
        if minor_at(path) is None:
            return VolumeUsage(problem=f"nothing is mounted at {target} now")
        try:
            found = usage_of(path)
        except BootseerError as error:
            return VolumeUsage(problem=str(error))
        return VolumeUsage(
            found.f_bavail * found.f_frsize,
            found.f_blocks * found.f_frsize,
            found.f_favail,
            found.f_files,
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _publish(
        self,
        settings: Settings,
        record: VolumeRecord,
        target: Path,
        secrets: Mapping[str, str],
        before: VolumeRecord | None,
    ) -> None:
        """Mount a volume. The caller holds the target's lock.

        `settings` are those of the volume's start (`join_start`). If `before` is given, its dead
        mount stays below the new one: until then the pod gets errors and never sees a directory of
        the node's disk.
        """
        if before is None:
            # A killed driver may have left a mount.
            free_target(target)
        try:
            volume = record.volume
            if isinstance(volume, CheckpointVolume):
                directory = self._checkpoints.directory_of(volume, secrets)
                record = replace(record, backing=str(directory))
                with self._locked(record.backing):
                    self._records.write(record)
                    # The fan-out's process reads the storage without the pod's secrets.
                    fanout = b"" if secrets else fanout_address(settings)
                    minor = self._checkpoints.mount(volume, directory, secrets, fanout)
                    make_target(target)
                    bind(directory, target, read_only=record.is_read_only)
            else:
                found = self._trees.find(settings, volume)
                try:
                    record = replace(record, backing=found.digest)
                    self._records.write(record)
                    make_target(target)
                    minor = self._trees.show(settings, record.tree_key, volume, found, target)
                finally:
                    found.release()
            self._records.write(replace(record, device_minor=minor))
        except BaseException:
            with contextlib.suppress(BootseerError):
                if before is None:
                    free_target(target)
                    self._records.remove(record.target)
                else:
                    self._records.write(before)
            raise

    def _is_served(self, record: VolumeRecord) -> bool:
        if isinstance(record.volume, CheckpointVolume):
            minor = self._checkpoints.minor(Path(record.backing)) if record.backing else None
        else:
            minor = self._trees.minor(record.tree_key)
        return minor is not None and minor == record.device_minor

    def _is_shared(self, record: VolumeRecord) -> bool:
        """Return whether other volumes use the checkpoint directory of this one."""
        return any(
            one.backing == record.backing and one.target != record.target
            for one in self._records.all()
        )

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count the block as a publish; fail at once if there are `_PUBLISHES_MAX` already."""
        if not self._publishes.acquire(blocking=False):
            raise UnavailableError(
                f"{_PUBLISHES_MAX} other volumes are being published on this node; try again"
            )
        try:
            yield
        finally:
            self._publishes.release()

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=_LOCK_S):
            raise UnavailableError(f"another call is working on {name[:200]}; try again")
        try:
            yield
        finally:
            lock.release()

    # ---- repair ---------------------------------------------------------------------------------

    def _repair_until_closed(self) -> None:
        while True:
            try:
                self.repair()
            except Exception:
                _log.exception("cannot check the volumes")
            if self._closing.wait(_REPAIR_EVERY_S):
                return

    def repair(self) -> None:
        """Check all volumes once.

        Volumes of deleted pods lose their record, volumes whose server died are mounted again, and
        servers that no volume uses are ended.
        """
        spawner = os.environ.get(SPAWNER)
        if spawner and not is_answering(Path(spawner)):
            # Without the spawner, servers would be children of this process and end with it.
            return
        for record in list(self._records.all()):
            try:
                with self._locked(record.target):
                    self._repair(record)
            except (BootseerError, OSError) as error:
                _log.warning("the volume %s has a problem: %s", record.target, error)
            except Exception:
                _log.exception("unexpected error with the volume %s", record.target)
        records = list(self._records.all())
        self._trees.retire(frozenset(one.tree_key for one in records), _LINGER_S)
        for directory in self._checkpoints.unused({Path(one.backing) for one in records}):
            with contextlib.suppress(BootseerError), self._locked(str(directory)):
                if not any(one.backing == str(directory) for one in self._records.all()):
                    self._checkpoints.unmount(directory)

    def _repair(self, record: VolumeRecord) -> None:
        if self._records.read(record.target) != record:
            return
        target = Path(record.target)
        # The kubelet makes the target's directory before publishing and removes it afterwards.
        if not target.parent.is_dir():
            _log.info("the pod of volume %s is gone", record.target)
            self._records.remove(record.target)
        elif record.device_minor and not self._is_served(record):
            if record.has_secrets:
                raise UnavailableError("its server died, and its secrets were not kept")
            _log.warning("mounting the volume %s again: its server died", record.target)
            # Its start is long over.
            self._publish(replace(self.settings, fanout=False), record, target, {}, record)


def _check_id(volume_id: str) -> None:
    if not volume_id or len(volume_id) > _ID_CHARS_MAX:
        raise InvalidInputError("the call has no volume id, or one that is too long")
