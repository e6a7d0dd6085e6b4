"""Process behind one mounted checkpoint tree: `python -m bootseer.fuse.striped.mounted.server`.

Reads its plan, a line of JSON on standard input, mounts, and supervises the worker process that
answers the kernel. A server that is replaced by newer code executes this module again (`--resume`)
while files are open, so the module must keep its name.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import from_line, to_line
from bootseer.base.redact import public_url
from bootseer.errors import EXIT_FAILURE, exit_code_of, from_oserror
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached
from bootseer.fuse.striped.mounted.options import SUBTYPE, CheckpointPlan, MountSpec
from bootseer.served.processes import CHECKPOINTS, Ready, Report, serve
from bootseer.served.service import (
    CHECKPOINT,
    ServiceState,
    hold_folder,
    new_service_dir,
    read_state,
)
from bootseer.served.supervision.hand_over import RESUME, exec_newer, read_document
from bootseer.served.supervision.heartbeat import silence_for
from bootseer.served.supervision.supervisor import supervise
from bootseer.store.paths import split_scheme

_log = logging.getLogger(__name__)

_WORKER = "bootseer.fuse.striped.mounted.worker"
_THREADS = 16
# Age, in deadlines, at which a request is answered with an error. It ends requests whose own
# deadlines have failed; a request may wait longer than one deadline while bytes are transferred.
_REQUEST_DEADLINES = 4
_READAHEAD_BYTES, _KERNEL_READAHEAD_BYTES = 1 << 20, 128 << 10
"""Kernel's read-ahead of files that are read through its page cache, and its default."""


def serve_checkpoints(spec: MountSpec, on_ready: Callable[[], None] = lambda: None) -> list[str]:
    """Mount and serve in the foreground; return the files that were left unwritten at the end.

    Main thread of a single-threaded process only. Raises: BootseerError.
    """
    plan = CheckpointPlan(spec, new_service_dir(Path(spec.run_dir)))
    return _serve(plan, _watch_owner(spec), on_ready=on_ready)


def _serve(
    plan: CheckpointPlan,
    owner_fd: int | None,
    *,
    lock_fd: int | None = None,
    attached: Attached | None = None,
    report: Report | None = None,
    answer: Callable[[], Struct] = Ready,
    on_ready: Callable[[], None] = lambda: None,
) -> list[str]:
    """Serve until the mount ends; return the files that were left unwritten.

    `lock_fd` and `attached` come from the code that this process executed before. `report` receives
    the answer once the mount works, or an error.
    """
    with hold_folder(plan.state_dir, _state_of(plan), lock_fd) as life:

        def worker(attached: Attached) -> Operations:
            # Imported here, so that the supervisor stays small.
            from bootseer.fuse.striped.mounted.worker import CheckpointWorker

            return CheckpointWorker(
                plan,
                owner_fd=owner_fd,
                device_minor=attached.device_minor,
                can_restart=attached.connection.resend,
                allows_passthrough=attached.connection.passthrough,
                maps_direct_io=attached.connection.direct_io_mmap,
            ).operations

        def hand_over(attached: Attached) -> None:
            document = {"plan": to_line(plan), "owner_fd": owner_fd, "lock_fd": life.lock}
            exec_newer(CHECKPOINTS.module, _WORKER, attached, document)

        supervise(
            worker,
            Path(plan.spec.directory),
            _mount_options(plan.spec),
            report=report,
            answer=answer,
            on_ready=on_ready,
            attached=attached,
            hand_over=hand_over,
        )
    ended = read_state(plan.state_dir)
    return list(ended.unwritten) if ended is not None else []


def _state_of(plan: CheckpointPlan) -> ServiceState:
    return ServiceState(
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
        max_readahead_bytes=_READAHEAD_BYTES if spec.page_cache else _KERNEL_READAHEAD_BYTES,
        request_deadline_s=_REQUEST_DEADLINES * spec.deadline_s,
        shutdown_s=spec.shutdown_s,
        worker_silence_s=silence_for(spec.deadline_s),
        # Passthrough works only for files of this node, and only for root.
        passthrough=split_scheme(spec.url) in ("", "file") and os.geteuid() == 0,
    )


def _watch_owner(spec: MountSpec) -> int | None:
    """Return a descriptor that becomes readable when the mount's user process ends."""
    if spec.user is None:
        return None
    try:
        return spec.user.open()
    except OSError as error:
        raise from_oserror(error, f"watch process {spec.user.pid}") from error


def serve_plan(plan: CheckpointPlan, report: Report, answer: Callable[[], Struct] = Ready) -> None:
    """Serve until the mount ends; `report` receives `answer()` once the mount works."""
    _serve(plan, _watch_owner(plan.spec), report=report, answer=answer)


def _serve_line(line: bytes, report: Report) -> None:
    serve_plan(from_line(line, CheckpointPlan), report)


def _resume(document_fd: int) -> list[str]:
    """Serve the mount that this process served before it executed newer code.

    `document_fd`: descriptor of the document in which the older code describes the mount.
    """
    document, attached = read_document(document_fd)
    plan = from_line(document["plan"], CheckpointPlan)
    return _serve(plan, document["owner_fd"], lock_fd=document["lock_fd"], attached=attached)


def main() -> int:
    """Return the exit code: 0 after an unmount, 1 if files were still being written."""
    if RESUME not in sys.argv:
        return serve(CHECKPOINTS, _serve_line)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        unwritten = _resume(int(sys.argv[2]))
    except Exception as error:
        _log.exception("the mount ended")
        return exit_code_of(error)
    # Only a mount in the foreground gets here: its caller reads the exit code.
    for path in unwritten:
        _log.warning("%s was still being written: nothing of it is kept", path)
    return EXIT_FAILURE if unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
