"""Preloaders of a start: services that fork a job's workers, if an earlier start left a record.

One preloader is for the workers, or for a program without a launcher; one is for the launcher
itself, if that is a Python program. Each has a folder as every service has (`served.service`), and
holds its lock. It ends when none of the service's users lives: the start's process, then with
`--linger` the start's attendant. The subfolder `job` is for the job's processes, which in a
container see nothing else of the folder: `plan`, `socket`, and `python`, the stand-in of workers.

`make_preloaders` makes the folders. `begin_preloaders` begins the processes, or takes over
processes that linger. A copy of this process does that, where the command will run: in the
container's root, as its user. Main thread only.
"""

import contextlib
import json
import marshal
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bootseer import __version__
from bootseer.base.documents import from_line, to_line
from bootseer.errors import BootseerError, UnavailableError
from bootseer.linux.locks import open_log
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.linux.processes import ProcessId, close_descriptors, run_forked
from bootseer.served.preload import (
    PYTHON_VARIABLE,
    SERVER_VARIABLE,
    VARIABLE,
    is_worker_variable,
)
from bootseer.served.preload import shim as shim_module
from bootseer.served.preload.programs import (
    is_startable,
    kernel_words,
    read_record,
    read_refused,
    record_paths,
)
from bootseer.served.preload.record import digests_of
from bootseer.served.preload.shim import inherited_attributes, leads_session
from bootseer.served.service import (
    PRELOAD,
    USERS,
    ServiceState,
    lingering_services,
    lock_new,
    log_path,
    new_identity,
    new_service_dir,
    read_state,
    remove_service_dir,
    write_state,
)
from bootseer.served.users import add_user
from bootseer.settings.config import Settings

RECORD, LAUNCHER_RECORD = "record.json", "launcher.json"
"""Import records that a job in a container writes to the subfolder `job`."""
_JOB = "job"
_TAKE_OVER_S = 1.0
"""Limit for the answer of a lingering preloader, which may still be importing."""
_BEGIN_S = 15.0


class PreloaderFolder(Struct):
    """Folder of a preloader, and the record of the program that it is for."""

    service: Path
    shown: str
    """Path of the subfolder `job` as the job's processes see it."""
    record_path: Path
    """Record on this node."""
    record: dict[str, Any] | None

    @property
    def job(self) -> Path:
        """Subfolder for the job's processes."""
        return self.service / _JOB


class _Begun(Struct):
    """Result of the copy that begins the preloaders."""

    failure: str = ""
    pids: list[int] = []
    """Process of each new preloader; 0 for none."""
    is_shown: list[bool] = []
    """Whether the job uses each new folder."""
    added: dict[str, str] = {}
    command: list[str] = []


def make_preloaders(settings: Settings, *, in_image: bool = False) -> list[PreloaderFolder]:
    """Make the folders of this start's preloaders: the workers', and a known launcher's.

    Raises: BootseerError, OSError.
    """
    folders: list[PreloaderFolder] = []
    process = ProcessId.of(os.getpid())
    for path in record_paths(settings, in_image=in_image):
        record = read_record(path)
        if folders and record is None:
            continue
        private_directory(path.parent)
        service = new_service_dir(settings.run_dir, f"{PRELOAD}-{new_identity()}")
        job = private_directory(service / _JOB)
        state = ServiceState(
            id=service.name,
            reference=f"{settings.job} (recording)",
            index_digest="",
            workload="",
            directory="",
            pid=0,
            started_ns=time.time_ns(),
            purpose=PRELOAD,
            user=process,
        )
        write_state(service, state)
        add_user(service, process.pid)
        folders.append(PreloaderFolder(service, str(job), path, record))
    return folders


def begin_preloaders(
    settings: Settings,
    folders: Sequence[PreloaderFolder],
    environ: Mapping[str, str],
    command: tuple[str, ...],
    *,
    is_standby: bool = False,
    enter: Callable[[], object] | None = None,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Begin the preloaders of this start, if an earlier start has left records.

    `environ`: environment of the command. `is_standby`: whether a later start will run the
    command. `enter` moves a copy of this process into the command's container. Return variables to
    add to the environment, and the command to run in place of `command`.

    Raises: BootseerError, OSError; then there is no preloader.
    """
    plans = _plans(settings, folders, environ, in_image=enter is not None)
    refused = {
        plan["refused"]: data
        for folder, plan in zip(folders, plans, strict=True)
        if (data := read_refused(folder.record_path))
    }
    # Opened here, since they are out of reach from a container.
    private_directory(settings.run_dir / "logs")
    locks = [lock_new(folder.service) for folder in folders]
    logs = [open_log(log_path(settings.run_dir, folder.service.name)) for folder in folders]
    may_fork_launcher = is_standby or leads_session()

    def work() -> bytes:
        begin = _Begin(settings, environ, command, is_in_image=enter is not None)
        try:
            if enter is not None:
                enter()
                for path, data in refused.items():
                    _write(Path(path), data)
            for folder, plan, *files in zip(folders, plans, locks, logs, strict=True):
                begin.add(folder, plan, (files[0], files[1]), may_fork_launcher=may_fork_launcher)
        except (BootseerError, OSError) as error:
            begin.result.failure = str(error)
        return to_line(begin.result).encode()

    try:
        answer = run_forked(work, _BEGIN_S)
    finally:
        for descriptor in (*locks, *logs):
            os.close(descriptor)
    begun = from_line(answer, _Begun) if answer else _Begun("they could not be begun in time")
    if begun.failure:
        raise UnavailableError(begun.failure)
    _note_begun(settings, folders, begun)
    return begun.added, tuple(begun.command)


def _note_begun(settings: Settings, folders: Sequence[PreloaderFolder], begun: _Begun) -> None:
    """Write the processes that have begun to the states, and remove what nobody uses."""
    for folder, pid, is_shown in zip(folders, begun.pids, begun.is_shown, strict=True):
        if pid:
            state = read_state(folder.service)
            assert state is not None
            started = ProcessId.of(pid).started
            state = replace(state, reference=settings.job, pid=pid, pid_started=started)
            write_state(folder.service, state)
            continue
        log_path(settings.run_dir, folder.service.name).unlink(missing_ok=True)
        if not is_shown:
            remove_service_dir(folder.service)


def _plans(
    settings: Settings,
    folders: Sequence[PreloaderFolder],
    environ: Mapping[str, str],
    *,
    in_image: bool,
) -> list[dict[str, Any]]:
    salt = secrets.token_hex(8)
    start = {
        "release": __version__,
        "job": settings.job,
        "process": tuple(ProcessId.of(os.getpid())),
        "salt": salt,
        "variables": digests_of(environ, salt),
        "memory_bytes": settings.preload_limit_bytes,
    }
    programs = []
    for number, path in enumerate(record_paths(settings, in_image=in_image)):
        record = folders[number].record if number < len(folders) else None
        seen = path
        if in_image:
            seen = Path(folders[0].shown, (RECORD, LAUNCHER_RECORD)[number])
        programs.append(
            {
                "record": str(seen),
                "refused": str(seen.with_suffix(".refused.json")),
                "program": record,
            }
        )
    workers, launcher = programs
    return [
        {**start, "users": "" if in_image else str(folder.service / USERS), **program}
        for folder, program in zip(
            folders, ({**workers, "launcher": launcher}, launcher), strict=False
        )
    ]


class _Begin:
    """Work of the copy of the start that begins the preloaders, or takes over others."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        command: tuple[str, ...],
        *,
        is_in_image: bool,
    ) -> None:
        self.result = _Begun(command=list(command))
        self._run_dir = settings.run_dir
        self._environ = environ
        self._command = command
        self._is_in_image = is_in_image
        # Before this process enters a container, where our sources are not.
        self._shim = Path(shim_module.__file__).read_text(encoding="utf-8")

    def add(
        self,
        folder: PreloaderFolder,
        plan: dict[str, Any],
        files: tuple[int, int],
        *,
        may_fork_launcher: bool,
    ) -> None:
        """Begin a preloader, the workers' first. `files`: lock and log. Raises: OSError."""
        is_for_launcher = bool(self.result.pids)
        record = folder.record if folder.record and is_startable(folder.record) else None
        words = kernel_words(record, self._command, self._environ) if record else []
        shown, pid = folder.shown, 0
        # Only the leader of a session can be forked. A worker is one; a launcher may not be.
        if is_for_launcher and not (words and may_fork_launcher):
            shown = ""
        else:
            variables: dict[str, str] = {}
            if record is not None:
                added = {VARIABLE: shown, **self.result.added}
                variables = _environment(record, {**self._environ, **added})
                shown = self._take_over(plan, record["words"], variables) or shown
            if shown == folder.shown:
                _write(Path(shown, "plan"), json.dumps(plan).encode())
                if record is not None:
                    pid = self._spawn(shown, record, variables, *files)
            if not is_for_launcher:
                self.result.added[VARIABLE] = shown
            if record is not None and words and os.access(f"{shown}/python", os.X_OK):
                self.result.command = [f"{shown}/python", *words[1:]]
                self.result.added[PYTHON_VARIABLE] = record["executable"]
        self.result.pids.append(pid)
        self.result.is_shown.append(shown == folder.shown)

    def _take_over(
        self, plan: dict[str, Any], words: list[str], variables: Mapping[str, str]
    ) -> str:
        # In a container none lingers: each start has a new root.
        return "" if self._is_in_image else _take_over(self._run_dir, plan, words, variables)

    def _spawn(
        self, shown: str, record: dict[str, Any], variables: dict[str, str], lock: int, log: int
    ) -> int:
        shim = f"#!{record['executable']} -ISE\n{self._shim}"
        _write(Path(shown, "python"), shim.encode(), 0o700)
        with _listener(Path(shown)) as listener:
            kept = (listener.fileno(), lock)
            where = "|".join(map(str, (shown, *kept, 1)))
            return _spawn(record, {**variables, SERVER_VARIABLE: where}, log, kept)


def warm_sentences(settings: Settings) -> Iterator[str]:
    """Yield a sentence for people about each lingering preloader of the job."""
    for service in lingering_services(settings.run_dir, PRELOAD, settings.job):
        count, _, pid = _ask(service.folder / _JOB, {"status": True}).partition(" ")
        if count not in ("", "0"):
            yield f"imports: {count} modules are in process {pid}"
        else:
            yield "imports: not there yet"


def _take_over(
    run_dir: Path, plan: dict[str, Any], words: list[str], variables: Mapping[str, str]
) -> str:
    """Make a lingering preloader of the job serve this start; one that does not fit ends.

    Return the preloader's folder `job`; "" if there is none.
    """
    process = ProcessId(*plan["process"])
    environment = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    about = {**inherited_attributes(), "words": words, "environment": environment}
    for service in lingering_services(run_dir, PRELOAD, plan["job"]):
        job = service.folder / _JOB
        with contextlib.suppress(OSError, BootseerError, ValueError, KeyError):
            other = json.loads((job / "plan").read_bytes())
            # The code of another release may read other requests; it ends with its attendant.
            if any(other[name] != plan[name] for name in ("record", "release")):
                continue
            ours = {**plan, "users": str(service.folder / USERS)}
            with _asked(job, {**about, "adopt": ours}, process) as (connection, answer):
                if answer[:1] == b"F":
                    add_user(service.folder, process.pid)
                    write_private_file(job / "plan", json.dumps(ours).encode())
                    write_state(service.folder, replace(service.state, user=process))
                    connection.sendall(b"G")
                    return str(job)
    return ""


def _ask(job: Path, request: dict[str, Any]) -> str:
    """Return a preloader's answer; "" if it does not answer."""
    with (
        contextlib.suppress(OSError),
        _asked(job, request, ProcessId.of(os.getpid())) as (_, answer),
    ):
        return answer[1:].decode()
    return ""


@contextlib.contextmanager
def _asked(
    job: Path, request: dict[str, Any], process: ProcessId
) -> Iterator[tuple[socket.socket, bytes]]:
    """Send a request for a process. Yield the connection and the answer. Raises: OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TAKE_OVER_S)
        with _opened(job) as directory:
            connection.connect(f"/proc/self/fd/{directory}/socket")
        data = marshal.dumps({"descriptors": [], **request})
        with _opened(process.open()) as descriptor:
            socket.send_fds(connection, [len(data).to_bytes(8, "big")], [descriptor])
        connection.sendall(data)
        yield connection, connection.recv(4096)


@contextlib.contextmanager
def _opened(what: Path | int) -> Iterator[int]:
    descriptor = what if isinstance(what, int) else os.open(what, os.O_PATH | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _environment(record: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    missing = {name for name in record["missing"] if not is_worker_variable(name)}
    return {
        **{name: value for name, value in environ.items() if name not in missing},
        **record["extra"],
    }


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _listener(job: Path) -> socket.socket:
    """Return a listening socket, made before the preloader so that early clients wait."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _opened(job) as directory:
        # A socket's address is limited to 108 bytes.
        listener.bind(f"/proc/self/fd/{directory}/socket")
    listener.listen(128)
    return listener


def _spawn(
    record: Mapping[str, Any], environ: Mapping[str, str], log: int, kept: Sequence[int]
) -> int:
    """Start the job's interpreter as a preloader. Return its pid.

    The preloader is a child of init as soon as this copy of the start has ended.
    """
    words = [record["executable"], *record["words"], *record["arguments"]]
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number, descriptor in enumerate((null, log, log)):
                os.dup2(descriptor, number)
            close_descriptors(*kept)
            for descriptor in kept:
                os.set_inheritable(descriptor, True)
            os.execve(words[0], words, environ)
        finally:
            os._exit(127)
    return child
