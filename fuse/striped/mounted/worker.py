"""Process that answers the kernel's requests for one mounted checkpoint tree.

The worker opens the storage, continues from the journal of a predecessor if there was one, answers
commands on the control socket, and notes at its end which files were not written.
"""

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from bootseer.base.redact import public_url
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)
from bootseer.fuse.striped.memory import content_bytes
from bootseer.fuse.striped.mounted.file_system import MountedTree, Ownership
from bootseer.fuse.striped.mounted.journal import Inherited, Journal, read_journal
from bootseer.fuse.striped.mounted.newest import read_newest
from bootseer.fuse.striped.mounted.options import FANOUT, JOURNAL, CheckpointPlan, MountSpec
from bootseer.fuse.striped.mounted.status import (
    FiguresWriter,
    MountFigures,
    RecentErrors,
    status_document,
)
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.linux.processes import start_time
from bootseer.served.control import ControlServer
from bootseer.served.service import read_state, write_state
from bootseer.served.supervision.supervisor import HANDED_OVER
from bootseer.served.users import last_user
from bootseer.store import open_backend
from bootseer.store.paths import folder_above

if TYPE_CHECKING:
    from bootseer.fanout.local import SharedRanges

_log = logging.getLogger(__name__)

# Share of the memory for read-ahead of the newest checkpoint; other reads need the rest.
_WARM_SHARE = 0.75
# Interval of checks whether the fan-out of the start has ended.
_LOOK_S = 1.0
# Pause before the process ends, in which the answer to the restart command is sent.
_ANSWER_S = 0.05

# mallopt(3), glibc's numbers; the threshold is the largest that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_THRESHOLD_BYTES = 32 * 2**20
# Freed memory that malloc keeps, for the units of a few writers; more is returned to the system.
_KEPT_BYTES = 64 * 2**20


def _keep_freed_memory() -> None:
    """Configure malloc to keep the freed units of writers instead of returning them to the kernel.

    Otherwise every 4 MiB unit costs a thousand page faults. (Reads have buffers of their own.) No
    effect if the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_ARENA_MAX, 1)


class CheckpointWorker:
    """Worker of one mount: its storage, `MountedTree`, control socket and figures."""

    def __init__(
        self,
        plan: CheckpointPlan,
        *,
        owner_fd: int | None,
        device_minor: int,
        can_restart: bool,
        allows_passthrough: bool,
        maps_direct_io: bool,
    ) -> None:
        """Open the storage and continue from a predecessor's journal, if there is one.

        Args:
            plan: The mount.
            owner_fd: Pidfd of the process that the mount is for.
            device_minor: Number of the mount's connection.
            can_restart: Whether the kernel sends pending requests again to a successor.
            allows_passthrough: As for `MountedTree`.
            maps_direct_io: As for `MountedTree`.

        Raises: BootseerError.
        """
        _keep_freed_memory()
        spec = self._spec = plan.spec
        self._folder = plan.state_dir
        self._owner_fd = owner_fd
        self._device_minor = device_minor
        self._can_restart = can_restart
        self._errors = RecentErrors()
        logging.getLogger("bootseer").addHandler(self._errors)
        self._stopping = threading.Event()
        self._figures_writer: FiguresWriter | None = None
        path = self._folder / JOURNAL
        self._is_successor = path.exists()
        inherited = _read_inherited(path)
        self._storage = storage = StripedStorage(
            open_backend(spec.url, deadline_s=spec.deadline_s),
            spec.stripe_settings,
            memory_bytes=content_bytes(spec.memory_bytes),
        )
        try:
            self._root_was_made = not self._is_successor and _check_root(storage, spec)
            uid = os.geteuid() if spec.uid is None else spec.uid
            gid = os.getegid() if spec.gid is None else spec.gid
            self.operations = MountedTree(
                storage,
                owner=Ownership(uid, gid, spec.umask),
                journal=Journal(path),
                inherited=inherited,
                allows_passthrough=allows_passthrough,
                maps_direct_io=maps_direct_io,
                uses_page_cache=spec.page_cache,
                on_mounted=self._begin,
                on_end=self._end,
                on_destroyed=storage.close,
            )
        except BaseException:
            storage.close()
            raise

    # ---- begin and end --------------------------------------------------------------------

    def _begin(self) -> None:
        state = read_state(self._folder)
        if state is None:
            raise CorruptError(f"{self._folder} has no state of the mount")
        self._state = replace(
            state,
            worker_pid=os.getpid(),
            worker_started=start_time(os.getpid()),
            device_minor=self._device_minor,
            root_was_made=self._root_was_made or state.root_was_made,
        )
        write_state(self._folder, self._state)
        self._control = ControlServer(
            self._folder,
            {
                "status": self._status,
                "restart": self._restart,
                "restart-now": lambda: self._restart(now=True),
                "warm": self._begin_warming,
            },
        )
        if self._owner_fd is not None:
            self._control.watch_descriptor(self._owner_fd, self._on_user_end)
        self._control.start()
        if self._spec.metrics_dir is not None:
            self._figures_writer = FiguresWriter(
                self._spec.metrics_dir, self._spec.url, self._gather_figures
            )
        if self._spec.read_newest and not self._is_successor:
            self._begin_warming()

    def _end(self, unwritten: Sequence[str]) -> None:
        """Stop, after the last request, if no successor takes over."""
        self._stopping.set()
        self._control.close()
        if self._figures_writer is not None:
            self._figures_writer.close()
        if unwritten:
            with contextlib.suppress(BootseerError):
                write_state(self._folder, replace(self._state, unwritten=tuple(unwritten)))

    def _on_user_end(self) -> None:
        """Watch another process that uses the mount, or unmount if there is none."""
        while (user := last_user(self._folder)) is not None:
            with contextlib.suppress(ProcessLookupError):
                self._control.watch(user, self._on_user_end)
                return
        # Unmounts, as any SIGTERM does.
        os.kill(os.getpid(), signal.SIGTERM)

    def _begin_warming(self) -> Mapping[str, Any]:
        threading.Thread(target=self._warm, name="stripe-warm", daemon=True).start()
        return {}

    def _warm(self) -> None:
        storage, budget_bytes = self._storage, int(self._storage.memory.limit_bytes * _WARM_SHARE)
        ranges = self._shared_ranges()
        count = read_newest(
            storage, budget_bytes, self._stopping.is_set, url=self._spec.url, ranges=ranges
        )
        _log.info("read %d bytes of the newest checkpoint ahead", count)
        if ranges is not None:
            _log.info("the fan-out brought %d bytes of it", ranges.shared_bytes)
            # Until the start is over, the job may read again ranges that memory no longer holds.
            while not ranges.is_over and not self._stopping.wait(_LOOK_S):
                pass
            storage.reader.end_sharing(ranges)
            ranges.close()

    def _shared_ranges(self) -> "SharedRanges | None":
        """Return ranges that the fan-out of the start may bring, or None if it has no fan-out."""
        try:
            address = (self._folder / FANOUT).read_bytes()
        except OSError:
            return None
        from bootseer.fanout.local import SharedRanges  # here: most mounts need none of it

        return SharedRanges(address)

    # ---- commands -------------------------------------------------------------------------

    def _status(self) -> Mapping[str, Any]:
        statistics = self._storage.counters.read()
        return status_document(
            self._state, statistics, self.operations.figures(), self._memory(), self._errors.kept()
        )

    def _memory(self) -> Mapping[str, int]:
        memory = self._storage.memory
        return {
            "limit_bytes": memory.limit_bytes,
            "used_bytes": memory.used_bytes,
            "peak_bytes": memory.peak_bytes,
        }

    def _gather_figures(self, is_mounted: bool) -> MountFigures:
        return MountFigures(
            self._storage.counters.read(),
            self.operations.figures(),
            self._memory(),
            self._state.started_ns / 1e9,
            is_mounted,
        )

    def _restart(self, *, now: bool = False) -> Mapping[str, Any]:
        """End soon, for a successor. Refuse while files are being written, unless `now`."""
        if not self._can_restart:
            raise UnsupportedError(
                "this kernel cannot hand a mount's requests to another process (Linux 6.9 can)"
            )
        if not now and (unfinished := self.operations.unsaved()):
            return {"unfinished": unfinished}
        threading.Thread(target=self._end_process, args=(now,), name="restart", daemon=True).start()
        return {"unfinished": ()}

    def _end_process(self, now: bool) -> None:
        time.sleep(_ANSWER_S)

        def end_process() -> None:
            _log.info("ending, so that another process goes on")
            logging.shutdown()
            # No clean-up is needed: a successor can continue even from a killed process.
            os._exit(HANDED_OVER)

        if now:
            end_process()
        self.operations.stop_if_quiet(end_process)


def _read_inherited(path: Path) -> Inherited:
    try:
        return read_journal(path)
    except (OSError, CorruptError) as error:
        _log.error("the open files of the last process are unknown: %s", error)
        return Inherited()


def _is_folder(url: str, deadline_s: float) -> bool:
    """Return whether there is a folder at `url`. Raises: BootseerError."""
    with contextlib.closing(open_backend(url, deadline_s=deadline_s)) as backend:
        try:
            return backend.stat("").is_dir
        except NotFoundError:
            return False


def _check_root(storage: StripedStorage, spec: MountSpec) -> bool:
    """Create the folder if it is missing. Return whether it was created.

    If the storage has folders, the parent folder must exist: otherwise a misspelt path would
    receive the checkpoints.

    Raises: BootseerError; NotFoundError if the parent folder is missing.
    """
    backend = storage.backend
    if not spec.read_only and not (
        backend.traits.one_step_rename or backend.traits.one_step_replace
    ):
        raise UnsupportedError(
            f"{public_url(spec.url)} cannot replace a file in one step, which a safe commit needs: "
            "mount it with --read-only"
        )
    try:
        if not backend.stat("").is_dir:
            raise InvalidInputError(
                f"{public_url(spec.url)} is a file; mount the folder that holds it"
            )
    except NotFoundError:
        if spec.read_only:
            raise
        above = folder_above(spec.url) if backend.traits.one_step_rename else None
        if above is not None and not _is_folder(above, spec.deadline_s):
            raise NotFoundError(
                f"{public_url(spec.url)} is not there, nor is the folder above it: check the URL, "
                f"or make {public_url(above)} first"
            ) from None
        backend.mkdir("")
        return True
    return False
