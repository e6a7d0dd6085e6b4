"""The process behind one mounted checkpoint tree: it holds the mount, and a worker of it serves.

Owns the mount's options, its state file, and the change to newer code while files are open: this
process then replaces itself (execve) and keeps the descriptor. Run as
`python -m bootseer.fuse.striped.mounted.server REPORT_FD` with a `MountSpec` on stdin (see
`background`).
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.redact import public_url
from bootseer.base.structs import asdict
from bootseer.errors import BootseerError, UnavailableError, exit_code_of, from_oserror
from bootseer.fuse.kernel import MountOptions
from bootseer.fuse.kernel.backing import table_from_text, table_to_text
from bootseer.fuse.kernel.connection import Connection
from bootseer.fuse.kernel.mounting.pulse import silence_for
from bootseer.fuse.kernel.mounting.supervisor import supervise
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.server import Attached
from bootseer.fuse.striped.mounted.life.mount_spec import (
    MountSpec,
    MountState,
    control_path,
    forget_ended,
    journal_path,
    read_state,
    write_state,
)
from bootseer.served.background import Report, python_environment
from bootseer.store.paths import split_scheme

_log = logging.getLogger(__name__)

SUBTYPE = "bootseer-stripe"
_THREADS = 16
# A request may wait for memory as long as bytes still move, so this is no measure of slowness: it
# is the end of any request whose own deadlines have failed.
_REQUEST_DEADLINES = 4
_IMPORT_S = 60.0
_IMPORTS = "import bootseer.fuse.striped.mounted.server, bootseer.fuse.striped.mounted.life.worker"
_RESUME = "--resume"


class _Handed(Struct, frozen=True):
    """What this process got from the one that it was before."""

    attached: Attached
    owner_fd: int | None


def serve_checkpoints(
    spec: MountSpec,
    on_ready: Callable[[], None],
    *,
    report: Report | None = None,
    handed: _Handed | None = None,
) -> list[str]:
    """Mount and serve in the foreground; returns the files that were left unwritten at the end.

    `report` hears why a worker could not start. Main thread of a single-threaded process only.
    Raises: BootseerError.
    """
    run_dir, directory = Path(spec.run_dir), Path(spec.directory)
    live: list[Attached] = []
    with _owner_of(spec, handed) as owner_fd:

        def worker() -> Operations:
            # Imported here: a worker that follows one that died starts with little to inherit.
            from bootseer.fuse.striped.mounted.life.worker import MountedFileSystem

            try:
                connection = live[0].connection
                return MountedFileSystem(
                    spec,
                    owner_fd=owner_fd,
                    can_restart=connection.resend,
                    passes_files=connection.passthrough,
                )
            except (BootseerError, OSError) as error:
                if report is not None:
                    report.send_error(error)
                raise
            finally:
                if report is not None:
                    # Ours is a copy: the supervisor reports when a worker serves.
                    report.close()

        if handed is None:
            # A predecessor's, who had a mount of his own.
            journal_path(run_dir, directory).unlink(missing_ok=True)
            write_state(run_dir, MountState.of_this_process(spec))
        try:
            supervise(
                worker,
                directory,
                _mount_options(spec),
                on_ready=on_ready,
                attached=handed.attached if handed is not None else None,
                on_attached=live.append,
                hand_over=lambda attached: _hand_over(spec, attached, owner_fd),
            )
        finally:
            unwritten = _note_end(run_dir, directory)
    return unwritten


def _note_end(run_dir: Path, directory: Path) -> list[str]:
    for path in (journal_path(run_dir, directory), control_path(run_dir, directory)):
        path.unlink(missing_ok=True)
    state = read_state(run_dir, directory)
    if state is None:
        return []
    write_state(run_dir, replace(state, ended=True))
    forget_ended(run_dir)
    return list(state.unwritten)


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


@contextlib.contextmanager
def _owner_of(spec: MountSpec, handed: _Handed | None) -> Iterator[int | None]:
    """A descriptor that becomes readable when the process ends that the mount is for."""
    if handed is not None:
        fd = handed.owner_fd
    elif spec.lifetime_pid is None:
        fd = None
    else:
        try:
            fd = os.pidfd_open(spec.lifetime_pid)
        except OSError as error:
            raise from_oserror(error, f"watch process {spec.lifetime_pid}") from error
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


# ---- newer code for the same mount ---------------------------------------------------------


def _hand_over(spec: MountSpec, attached: Attached, owner_fd: int | None) -> None:
    """Become what is installed now. Returns, after a warning, where that cannot be imported."""
    environment = python_environment()
    command = [sys.executable, "-m", "bootseer.fuse.striped.mounted.server"]
    check = [sys.executable, "-c", _IMPORTS]
    tried = subprocess.run(
        check, env=environment, cwd="/", capture_output=True, timeout=_IMPORT_S, check=False
    )
    if tried.returncode != 0:
        reason = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        _log.error("the code that is installed now does not start, going on as before: %s", reason)
        return
    document = {
        "spec": spec.to_json(),
        "owner_fd": owner_fd,
        "device": attached.device,
        "device_minor": attached.device_minor,
        "path": os.fspath(attached.path),
        "connection": asdict(attached.connection),
        "backing_table": attached.backing_table and table_to_text(attached.backing_table),
    }
    kept = os.memfd_create("bootseer-resume")
    with open(kept, "w", encoding="utf-8", closefd=False) as file:
        json.dump(document, file)
    os.lseek(kept, 0, os.SEEK_SET)
    for fd in (kept, attached.device, owner_fd):
        if fd is not None:
            os.set_inheritable(fd, True)
    _log.info("going on with the code that is installed now")
    os.execve(sys.executable, [*command, _RESUME, str(kept)], environment)


def _taken_over(kept: int) -> tuple[MountSpec, _Handed]:
    with open(kept, encoding="utf-8") as file:
        document = json.load(file)
    owner_fd = document["owner_fd"]
    for fd in (document["device"], owner_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    attached = Attached(
        document["device"],
        document["device_minor"],
        Path(document["path"]),
        Connection(**document["connection"]),
        # A server of an earlier release passed no files.
        table_from_text(table) if (table := document.get("backing_table")) else None,
    )
    return MountSpec.from_json(document["spec"]), _Handed(attached, owner_fd)


def main() -> None:
    """Entry point of the server process."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if sys.argv[1] == _RESUME:
        spec, handed = _taken_over(int(sys.argv[2]))
        serve_checkpoints(spec, lambda: None, handed=handed)
        return
    report = Report(int(sys.argv[1]), "the mount's server")

    def ready() -> None:
        if not report.send_ready():
            raise UnavailableError("nobody waits for the mount any more")

    try:
        spec = MountSpec.from_json(sys.stdin.read())
        serve_checkpoints(spec, ready, report=report)
    except BaseException as error:
        _log.exception("the mount ended")
        report.send_error(error)
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
