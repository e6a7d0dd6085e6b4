"""One mounted checkpoint tree, from its plan to its end, in the process that holds the mount.

Alone owns the mount's options, and what this process leaves to the newer code that it becomes
while files are open.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import from_line, to_line
from bootseer.base.redact import public_url
from bootseer.errors import from_oserror
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached
from bootseer.fuse.striped.mounted.life.spec import (
    MODULE,
    SUBTYPE,
    CheckpointPlan,
    MountSpec,
)
from bootseer.served.background import Report
from bootseer.served.folders import (
    CHECKPOINT,
    MountState,
    new_mount_dir,
    read_state,
)
from bootseer.served.life import living
from bootseer.served.supervision.hand_over import become_newer, taken_over
from bootseer.served.supervision.heartbeat import silence_for
from bootseer.served.supervision.supervisor import supervise
from bootseer.store.paths import split_scheme

_WORKER = "bootseer.fuse.striped.mounted.life.worker"
_THREADS = 16
# A request may wait for memory as long as bytes still move, so this is no measure of slowness: it
# is the end of any request whose own deadlines have failed.
_REQUEST_DEADLINES = 4


class _Handed(Struct, frozen=True):
    """What this process got from the one that it was before."""

    attached: Attached
    owner_fd: int | None
    lock_fd: int


def serve_checkpoints(
    spec: MountSpec,
    on_ready: Callable[[], None] = lambda: None,
    *,
    report: Report | None = None,
    state_dir: Path | None = None,
    handed: _Handed | None = None,
) -> list[str]:
    """Mount and serve in the foreground; returns the files that were left unwritten at the end.

    `report` hears that the mount works, or why not. `state_dir`: the server's folder, by default a
    new one. Main thread of a single-threaded process only. Raises: BootseerError.
    """
    plan = CheckpointPlan(spec, state_dir or new_mount_dir(Path(spec.run_dir)))
    owner_fd = _watch_owner(spec) if handed is None else handed.owner_fd
    lock = None if handed is None else handed.lock_fd
    with living(plan.state_dir, _state_of(plan), lock) as life:

        def worker(attached: Attached) -> Operations:
            # Imported here: a worker that follows one that died starts with little to inherit.
            from bootseer.fuse.striped.mounted.life.worker import CheckpointWorker

            return CheckpointWorker(
                plan,
                owner_fd=owner_fd,
                can_restart=attached.connection.resend,
                passes_files=attached.connection.passthrough,
                maps_direct_io=attached.connection.direct_io_mmap,
            ).operations

        def hand_over(attached: Attached) -> None:
            document = {
                "spec": to_line(spec),
                "state_dir": str(plan.state_dir),
                "owner_fd": owner_fd,
                "lock_fd": life.lock,
            }
            become_newer(MODULE, _WORKER, attached, document)

        supervise(
            worker,
            Path(spec.directory),
            _mount_options(spec),
            report=report,
            on_ready=on_ready,
            attached=None if handed is None else handed.attached,
            hand_over=hand_over,
        )
    ended = read_state(plan.state_dir)
    return list(ended.unwritten) if ended is not None else []


def go_on(left: int) -> list[str]:
    """As `serve_checkpoints`, of the mount that this process has held before it became this code;
    `left`: the descriptor of what it left itself. Raises: BootseerError."""
    document, attached = taken_over(left)
    spec = from_line(document["spec"], MountSpec)
    handed = _Handed(attached, document["owner_fd"], document["lock_fd"])
    return serve_checkpoints(spec, state_dir=Path(document["state_dir"]), handed=handed)


def _state_of(plan: CheckpointPlan) -> MountState:
    return MountState(
        id=plan.state_dir.name,
        reference=public_url(plan.spec.url),
        index_digest="",
        workload="",
        directory=plan.spec.directory,
        pid=0,
        started_ns=time.time_ns(),
        purpose=CHECKPOINT,
        user=plan.spec.user,
        fingerprint=plan.spec.fingerprint,
    )


def _mount_options(spec: MountSpec) -> MountOptions:
    # The kernel's option string has no way to quote.
    name = "".join("_" if c in ",\\" or not c.isprintable() else c for c in public_url(spec.url))
    return MountOptions(
        name=name,
        subtype=SUBTYPE,
        allow_other=spec.allow_other,
        default_permissions=not spec.everyone_writes,
        read_only=spec.read_only,
        threads=_THREADS,
        read_directory_plus=False,
        atomic_truncate=True,
        request_deadline_s=_REQUEST_DEADLINES * spec.deadline_s,
        shutdown_s=spec.shutdown_s,
        worker_silence_s=silence_for(spec.deadline_s),
        # Only files of this node can be read past us, and only root may ask for that.
        passthrough=split_scheme(spec.url) in ("", "file") and os.geteuid() == 0,
    )


def _watch_owner(spec: MountSpec) -> int | None:
    """A descriptor that becomes readable when the process ends that the mount is for."""
    if spec.user is None:
        return None
    try:
        return spec.user.open()
    except OSError as error:
        raise from_oserror(error, f"watch process {spec.user.pid}") from error
