"""The process that serves one mounted checkpoint tree.

Owns the life of the mount: start, warm-up, the watch on the process that the mount is for, the end.
Run as `python -m bootseer.fuse.striped.server REPORT_FD` with a `MountSpec` on stdin (see
`background`); reports whether the mount works, then serves until unmounted, a signal, or that
process ends.
"""

import contextlib
import ctypes
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bootseer.background import Report
from bootseer.errors import (
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
    exit_code_of,
    from_oserror,
)
from bootseer.fuse.kernel import MountOptions, Server
from bootseer.fuse.kernel.foreground import StopSignal
from bootseer.fuse.striped.control import ControlServer
from bootseer.fuse.striped.file_system import StripedFileSystem
from bootseer.fuse.striped.mount_spec import MountSpec, MountState, control_path, write_state
from bootseer.fuse.striped.presentation import Ownership
from bootseer.fuse.striped.status import RecentErrors, status_document
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.warm import warm_newest
from bootseer.redact import public_url
from bootseer.store import open_backend

_log = logging.getLogger(__name__)

SUBTYPE = "bootseer-stripe"
_THREADS = 16
# A request may wait for memory as long as bytes still move, so this is no measure of slowness: it
# is the end of any request whose own deadlines have failed.
_REQUEST_DEADLINES = 4
# What of the memory a warm-up may take: demand and other readers need the rest.
_WARM_SHARE = 0.75


# mallopt(3), glibc's numbers; the threshold is the largest that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_THRESHOLD_BYTES = 32 * 2**20


def _keep_freed_memory(limit_bytes: int) -> None:
    """Let malloc reuse the window's buffers instead of returning each to the kernel.

    Else every 4 MiB unit costs a thousand page faults: measured 0.73 against 0.50 CPU s/GiB of
    reading. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, min(limit_bytes, 2**31 - 1))
    mallopt(_M_ARENA_MAX, 1)


def serve_checkpoints(spec: MountSpec, on_ready: Callable[[], object]) -> list[str]:
    """Mount and serve in the foreground; returns the files that were left unwritten at the end.

    Main thread only. Raises: BootseerError.
    """
    _keep_freed_memory(spec.memory_bytes)
    errors = RecentErrors()
    logging.getLogger("bootseer").addHandler(errors)
    storage = StripedStorage(
        open_backend(spec.url, deadline_s=spec.deadline_s),
        spec.stripe_settings,
        memory_bytes=spec.memory_bytes,
    )
    try:
        _check_root(storage, spec)
        file_system = StripedFileSystem(
            storage.tree, storage.budget, spec.stripe_settings, owner=_owner(spec)
        )
        state = MountState.of_this_process(spec)
        with _lifetime(spec.lifetime_pid) as owner, StopSignal() as stop:
            server = Server(
                file_system, Path(spec.directory), _mount_options(spec), on_end=stop.wake
            )
            write_state(Path(spec.run_dir), state)
            stopping = threading.Event()
            control = ControlServer(
                control_path(Path(spec.run_dir), Path(spec.directory)),
                {"status": lambda: _status(storage, file_system, state, errors)},
            )
            try:
                server.mount()
                on_ready()
                if spec.warm:
                    _start_warming(storage, spec, stopping)
                select.select([stop.fileno(), *owner], [], [])
            finally:
                stopping.set()
                control.close()
                with contextlib.ExitStack() as ending:
                    ending.callback(
                        lambda: write_state(
                            Path(spec.run_dir), state.finished(file_system.unwritten)
                        )
                    )
                    server.unmount()
        return file_system.unwritten
    finally:
        storage.close()


def _status(
    storage: StripedStorage, file_system: StripedFileSystem, state: MountState, errors: RecentErrors
) -> dict[str, Any]:
    memory = {
        "limit_bytes": storage.budget.limit_bytes,
        "used_bytes": storage.budget.used_bytes,
        "peak_bytes": storage.budget.peak_bytes,
    }
    return status_document(
        state, storage.counters.look(), file_system.figures(), memory, errors.kept()
    )


def _owner(spec: MountSpec) -> Ownership:
    uid = os.geteuid() if spec.uid is None else spec.uid
    gid = os.getegid() if spec.gid is None else spec.gid
    return Ownership(uid, gid, spec.umask)


def _check_root(storage: StripedStorage, spec: MountSpec) -> None:
    if not spec.read_only and not storage.backend.has_atomic_rename:
        raise UnsupportedError(
            f"{public_url(spec.url)} cannot rename in one step, which a safe commit needs: mount "
            "it with --read-only"
        )
    try:
        if not storage.backend.stat("").is_dir:
            raise InvalidInputError(
                f"{public_url(spec.url)} is a file; mount the folder that holds it"
            )
    except NotFoundError:
        if spec.read_only:
            raise
        storage.backend.mkdir("")


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
    )


@contextlib.contextmanager
def _lifetime(pid: int | None) -> Iterator[list[int]]:
    """A list with a descriptor that becomes readable when the process ends; empty for None."""
    if pid is None:
        yield []
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise from_oserror(error, f"watch process {pid}") from error
    try:
        yield [fd]
    finally:
        os.close(fd)


def _start_warming(storage: StripedStorage, spec: MountSpec, stopping: threading.Event) -> None:
    def run() -> None:
        budget_bytes = int(spec.memory_bytes * _WARM_SHARE)
        count = warm_newest(storage, budget_bytes, stopping.is_set)
        _log.info("read %d bytes of the newest checkpoint ahead", count)

    threading.Thread(target=run, name="stripe-warm", daemon=True).start()


def main() -> None:
    """Entry point of the server process."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    report = Report(int(sys.argv[1]), "the mount's server")
    try:
        spec = MountSpec.from_json(sys.stdin.read())
        # Whoever started us may be gone: the mount is there for others, too.
        serve_checkpoints(spec, report.send_ready)
    except BaseException as error:
        _log.exception("the mount ended")
        report.send_error(error)
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
