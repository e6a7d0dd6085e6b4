"""What a kubelet asks of the driver. The gRPC service only translates to and from this.

Alone decides the order of the steps, and what happens to volumes whose server died. All that must
outlive this process is in records, in mounts, and in servers, which are other processes. Locks are
taken in this order: that of a target, that of a checkpoint folder. Thread-safe.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from bootseer.kubernetes.csi.attributes import (
    CheckpointVolume,
    check_secrets,
    parse_volume,
)
from bootseer.kubernetes.csi.binding import (
    bind,
    checked_target,
    free_target,
    make_target,
    minor_at,
    usage_of,
)
from bootseer.kubernetes.csi.checkpoints import Checkpoints
from bootseer.kubernetes.csi.records import Record, Records
from bootseer.kubernetes.csi.trees import Trees
from bootseer.kubernetes.pod_start import of_volume
from bootseer.kubernetes.timelines import noted
from bootseer.served.processes import SPAWNER
from bootseer.served.spawner import answers
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

NAME = "csi.bootseer.io"
_LOCK_S = 5.0
"""A call that waits longer for another one of its volume is refused: a kubelet tries again."""
_PUBLISHES_MAX = 12
"""At once, each in a thread of the gRPC server for as long as a registry or a storage takes. It has
16: taking volumes off, statistics and probes never wait for them."""
_LOOK_S = 10.0
_LINGER_S = 60.0
_END_S = 5.0
_ID_CHARS_MAX = 1024


class Request(Struct, frozen=True):
    """A volume that a kubelet wants to have published."""

    volume_id: str
    target: str
    context: Mapping[str, str]
    secrets: Mapping[str, str]
    is_read_only: bool


class Usage(Struct, frozen=True):
    """How full a volume is, or what is wrong with it."""

    available_bytes: int = 0
    total_bytes: int = 0
    available_inodes: int = 0
    total_inodes: int = 0
    problem: str = ""


class Driver:
    """The volumes of one node."""

    def __init__(self, settings: Settings, kubelet_dir: Path, sources: Sequence[str]) -> None:
        """`sources`: URLs below which checkpoint folders may lie; none: every remote one.

        Raises: BootseerError.
        """
        self.settings = settings
        self._kubelet_dir = kubelet_dir
        self._sources = tuple(sources)
        folder = kubelet_dir / "plugins" / NAME
        # What is mounted again for a pod that a restart of the machine has ended stays for ever:
        # Kubernetes 1.20 has forgotten inline volumes then, and such a pod would never go.
        self._records = Records(settings.run_dir / "volumes")
        self._trees = Trees(settings, folder)
        self._checkpoints = Checkpoints(settings, folder / "checkpoints")
        # Each lives as long as a call uses it.
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._publishes = threading.BoundedSemaphore(_PUBLISHES_MAX)
        self._closing = threading.Event()
        self._mender = threading.Thread(target=self._mend_until_closed, name="mend", daemon=True)

    def start(self) -> None:
        """Begin to look after published volumes."""
        self._mender.start()

    def close(self) -> None:
        """End, leaving every volume to its pod and to the next driver."""
        self._closing.set()
        if self._mender.is_alive():
            self._mender.join(_END_S)

    # ---- operations -----------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Have a volume at its target; nothing to do where it is there already.

        Raises: InvalidInputError, PermissionDeniedError for what may not be asked;
        AlreadyExistsError where another volume is there; NotFoundError, UnavailableError and other
        BootseerErrors where it cannot be had now. Nothing is mounted then.
        """
        _check_id(request.volume_id)
        target = checked_target(self._kubelet_dir, request.target)
        volume = parse_volume(request.context, self._sources)
        secrets = check_secrets(volume, request.secrets)
        record = Record(
            request.volume_id,
            request.target,
            volume,
            request.is_read_only,
            workload="",
            has_secrets=bool(secrets),
        )
        if not isinstance(volume, CheckpointVolume):
            record = replace(record, workload=volume.workload or self.settings.workload)
        with self._admitted(), self._locked(request.target):
            before = self._records.read(request.target)
            if before is not None:
                if replace(before, behind="", device_minor=0) != record:
                    raise AlreadyExistsError(
                        f"another volume, {before.volume_id}, is published at {target}"
                    )
                if minor_at(target) is not None and self._is_served(before):
                    return
            kind = type(volume).__name__.removesuffix("Volume").lower()
            with (
                # The folder of a target has the volume's name in the pod.
                noted(self.settings, of_volume(request.context), target.parent.name) as timeline,
                timeline.span(f"{kind} volume") if timeline else contextlib.nullcontext(),
            ):
                self._publish(record, target, secrets, before)

    def unpublish(self, volume_id: str, target: str) -> None:
        """Take a volume off its target; nothing to do where it is not there.

        Raises: InvalidInputError; UnavailableError, BusyError while files are being written to it
        or it is in use: it stays then.
        """
        _check_id(volume_id)
        path = checked_target(self._kubelet_dir, target)
        with self._locked(target):
            record = self._records.read(target)
            if record is None or not isinstance(record.volume, CheckpointVolume):
                free_target(path)
                self._records.remove(target)
                return
            directory = Path(record.behind) if record.behind else None
            if directory is not None:
                self._checkpoints.await_written(directory, is_shared=self._others(record))
            with self._locked(record.behind):
                free_target(path)
                if directory is not None and not self._others(record):
                    # Before the record goes: the kubelet asks again where this fails.
                    self._end(directory, record)
                self._records.remove(target)

    def _end(self, directory: Path, record: Record) -> None:
        try:
            self._checkpoints.unmount(directory)
        except CorruptError:
            # Told once; the kubelet's next call finds nothing left to be done.
            self._records.remove(record.target)
            raise

    def usage(self, volume_id: str, target: str) -> Usage:
        """How full the volume is. Raises: NotFoundError where it is not published there."""
        path = Path(target)
        record = self._records.read(target)
        if record is None or record.volume_id != volume_id:
            raise NotFoundError(f"no volume {volume_id[:200]!r} is published at {target[:200]}")
        if minor_at(path) is None:
            return Usage(problem=f"nothing is mounted at {target} now")
        try:
            found = usage_of(path)
        except BootseerError as error:
            return Usage(problem=str(error))
        return Usage(
            found.f_bavail * found.f_frsize,
            found.f_blocks * found.f_frsize,
            found.f_favail,
            found.f_files,
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _publish(
        self, record: Record, target: Path, secrets: Mapping[str, str], before: Record | None
    ) -> None:
        """Mount a volume, or on top of what a server that died has left, which shows an error and
        not a folder of the node's disk until then. The caller holds the target's lock."""
        if before is None:
            # What a killed driver left.
            free_target(target)
        try:
            volume = record.volume
            if isinstance(volume, CheckpointVolume):
                directory = self._checkpoints.directory_of(volume, secrets)
                record = replace(record, behind=str(directory))
                with self._locked(record.behind):
                    self._records.write(record)
                    minor = self._checkpoints.mount(volume, directory, secrets)
                    make_target(target)
                    bind(directory, target, read_only=record.is_read_only)
            else:
                found = self._trees.find(volume)
                try:
                    record = replace(record, behind=found.digest)
                    self._records.write(record)
                    make_target(target)
                    minor = self._trees.show(record, found, target)
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

    def _is_served(self, record: Record) -> bool:
        if isinstance(record.volume, CheckpointVolume):
            minor = self._checkpoints.minor(Path(record.behind)) if record.behind else None
            return minor is not None and minor == record.device_minor
        return self._trees.is_served(record)

    def _others(self, record: Record) -> bool:
        """Whether other volumes use the checkpoint folder of this one."""
        return any(
            one.behind == record.behind and one.target != record.target
            for one in self._records.all()
        )

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        """One of the publishes that may be under way. Raises: UnavailableError, at once."""
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
            raise UnavailableError(f"another call is at work on {name[:200]}; try again")
        try:
            yield
        finally:
            lock.release()

    # ---- what dies ------------------------------------------------------------------------------

    def _mend_until_closed(self) -> None:
        while True:
            try:
                self.mend()
            except Exception:
                _log.exception("cannot look after the volumes")
            if self._closing.wait(_LOOK_S):
                return

    def mend(self) -> None:
        """Forget volumes whose pods are gone, mount those anew whose servers died, and end servers
        that no volume uses."""
        spawner = os.environ.get(SPAWNER)
        if spawner and not answers(Path(spawner)):
            # It is being replaced, or removed: servers that were started here would end with us.
            return
        for record in list(self._records.all()):
            try:
                with self._locked(record.target):
                    self._mend(record)
            except (BootseerError, OSError) as error:
                _log.warning("the volume %s is not well: %s", record.target, error)
            except Exception:
                # The volumes behind it are to be looked after all the same.
                _log.exception("unexpected error with the volume %s", record.target)
        records = list(self._records.all())
        self._trees.retire(records, _LINGER_S)
        for directory in self._checkpoints.unused({Path(one.behind) for one in records}):
            with contextlib.suppress(BootseerError), self._locked(str(directory)):
                if not any(one.behind == str(directory) for one in self._records.all()):
                    self._checkpoints.unmount(directory)

    def _mend(self, record: Record) -> None:
        if self._records.read(record.target) != record:
            return
        target = Path(record.target)
        # The pod's folder of this volume is made before, and removed after, by the kubelet.
        if not target.parent.is_dir():
            _log.info("forgetting the volume %s, whose pod is gone", record.target)
            self._records.remove(record.target)
        elif record.device_minor and not self._is_served(record):
            if record.has_secrets:
                raise UnavailableError("its server died, and its secrets are nowhere kept")
            _log.warning("mounting the volume %s anew, whose server died", record.target)
            self._publish(record, target, {}, record)


def _check_id(volume_id: str) -> None:
    if not volume_id or len(volume_id) > _ID_CHARS_MAX:
        raise InvalidInputError("the call names no volume, or none that could be")
