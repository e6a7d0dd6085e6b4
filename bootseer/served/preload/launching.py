"""Start of preloaders by the launcher of a job, if an earlier start has left records.

One preloader is for the workers, or for a program without a launcher; one is for the launcher
itself, if that is a Python program. A preloader is a child of init with a session of its own, like
every server of a job; it ends with the process of the start. Main thread only: it forks.
"""

import contextlib
import fcntl
import json
import marshal
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer import __version__
from bootseer.errors import BootseerError
from bootseer.linux.locks import open_log
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import KILLED_S, ProcessId, close_descriptors, note_name, reap
from bootseer.linux.removal import remove_tree
from bootseer.served.preload import (
    LAUNCHER,
    PYTHON_VARIABLE,
    SERVER_VARIABLE,
    VARIABLE,
    is_worker_variable,
)
from bootseer.served.preload import shim as shim_module
from bootseer.served.preload.programs import is_startable, kernel_words, read_record, record_paths
from bootseer.served.preload.record import digests_of
from bootseer.served.preload.shim import inherited_attributes, leads_session
from bootseer.settings.config import Settings

_TAKE_OVER_S = 1.0
"""Limit for the answer of a lingering preloader, which may still be importing."""
_END_REQUEST = {"adopt": "", "descriptors": []}


def begin_preloaders(
    settings: Settings,
    environ: Mapping[str, str],
    command: tuple[str, ...],
    *,
    is_standby: bool = False,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Begin the preloaders of this start, if an earlier start has left records.

    `environ` is the environment of the command, which with `is_standby` another process will be.
    Return variables to add to it, and the command to run in place of `command`.

    Raises: BootseerError, OSError; then there is no preloader.
    """
    runs = private_directory(settings.run_dir / "preload")
    _sweep(runs)
    folder = runs / note_name(os.getpid())
    salt = secrets.token_hex(8)
    plan = {
        "release": __version__,
        "job": settings.job,
        "process": ProcessId.of(os.getpid()),
        "salt": salt,
        "variables": digests_of(environ, salt),
        "memory_bytes": settings.preload_limit_bytes,
        "linger_s": settings.linger_s,
    }
    workers, launcher = (_program(record_path) for record_path in record_paths(settings))
    added = {VARIABLE: str(folder)}
    chosen = command
    for suffix, program in (("", {**workers, "launcher": launcher}), (LAUNCHER, launcher)):
        record = program["program"]
        can_begin = record is not None and is_startable(record)
        words = kernel_words(record, command) if can_begin else []
        # Only the leader of a session can be forked. A worker is one; a launcher may not be.
        if suffix and not (words and (is_standby or leads_session())):
            continue
        place = private_directory(folder.with_name(f"{folder.name}{suffix}"))
        _write(place / "plan", json.dumps({**plan, **program}).encode())
        if can_begin:
            _begin(settings, place, record, {**environ, **added})
        if words and os.access(place / "python", os.X_OK):
            chosen = (str(place / "python"), *words[1:])
            added[PYTHON_VARIABLE] = record["executable"]
    return added, chosen


def _program(record_path: Path) -> dict[str, Any]:
    """Return the members of a plan for the program whose record is at `record_path`."""
    private_directory(record_path.parent)
    refused = str(record_path.with_suffix(".refused.json"))
    return {"record": str(record_path), "refused": refused, "program": read_record(record_path)}


def _begin(
    settings: Settings, folder: Path, record: dict[str, Any], environ: dict[str, str]
) -> None:
    """Provide a preloader at `folder`: take over a lingering one, or start a new one."""
    _write(folder / "python", _shim(record["executable"]), 0o700)
    variables = _environment(record, environ)
    if _take_over(folder, record["words"], variables):
        return
    suffix = LAUNCHER if folder.name.endswith(LAUNCHER) else ""
    log = private_directory(settings.run_dir / "logs") / f"preload-{os.getpid()}{suffix}.log"
    with _listener(folder) as listener:
        variables[SERVER_VARIABLE] = f"{folder}|{listener.fileno()}|1"
        _spawn(record, variables, log, listener.fileno())


def end_preloaders(settings: Settings) -> None:
    """End the lingering preloaders of the job. Never raises."""
    with contextlib.suppress(OSError):
        for folder, _ in _lingering(settings.run_dir / "preload", settings.job):
            _ask(folder, _END_REQUEST)


def warm_sentences(settings: Settings) -> Iterator[str]:
    """Yield a sentence for people about each lingering preloader of the job."""
    with contextlib.suppress(OSError):
        for folder, _ in _lingering(settings.run_dir / "preload", settings.job):
            count, _, pid = (_ask(folder, {"status": True, "descriptors": []}) or "").partition(" ")
            if count != "0" and pid:
                yield f"imports: {count} modules are in process {pid}"
            else:
                yield "imports: not there yet"


def _take_over(folder: Path, words: list[str], variables: Mapping[str, str]) -> bool:
    """Make a lingering preloader of the job serve this start, or end. Return whether it serves."""
    request = {
        **inherited_attributes(),
        "adopt": str(folder),
        "words": words,
        "environment": {os.fsencode(name): os.fsencode(one) for name, one in variables.items()},
        "descriptors": [],
    }
    ours = json.loads((folder / "plan").read_bytes())
    for other, plan in _lingering(folder.parent, ours["job"]):
        if plan["record"] != ours["record"]:
            continue
        if plan.get("release") != ours["release"]:
            # Its code is of another release, so it is only asked to end.
            _ask(other, _END_REQUEST)
            continue
        # The start's processes connect to this name if the preloader accepts.
        os.link(other / "socket", folder / "socket")
        if _ask(other, request) is not None:
            return True
        (folder / "socket").unlink()
    return False


def _lingering(runs: Path, job: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folder and plan of the job's preloaders whose launcher has ended."""
    for folder in runs.iterdir():
        if _has_launcher(folder):
            continue
        with contextlib.suppress(OSError, ValueError):
            if (plan := json.loads((folder / "plan").read_bytes()))["job"] == job:
                yield folder, plan


def _has_launcher(folder: Path) -> bool:
    pid, _, started = folder.name.partition("-")
    return not pid.isdigit() or ProcessId(int(pid), started.partition(".")[0]).lives()


def _ask(folder: Path, request: dict[str, Any]) -> str | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TAKE_OVER_S)
            with _opened(folder) as directory:
                connection.connect(f"/proc/self/fd/{directory}/socket")
            data = marshal.dumps(request)
            with _opened(os.pidfd_open(os.getpid())) as process:
                socket.send_fds(connection, [len(data).to_bytes(8, "big")], [process])
            connection.sendall(data)
            answer = connection.recv(4096)
            if answer[:1] != b"F":
                return None
            if "adopt" in request:
                connection.sendall(b"G")
            return answer[1:].decode()
    except OSError:
        return None


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


def _shim(executable: str) -> bytes:
    text = Path(shim_module.__file__).read_text(encoding="utf-8")
    return f"#!{executable} -ISE\n{text}".encode()


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _sweep(runs: Path) -> None:
    """Remove the folders of killed preloaders; a lingering one holds a lock."""
    for folder in runs.iterdir():
        if not _has_launcher(folder):
            with contextlib.suppress(OSError, BootseerError):
                with _opened(os.open(folder, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)


def _listener(folder: Path) -> socket.socket:
    """Return a listening socket, made before the preloader so that early clients wait."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _opened(folder) as directory:
        # A socket's address is limited to 108 bytes.
        listener.bind(f"/proc/self/fd/{directory}/socket")
    listener.listen(128)
    return listener


def _spawn(record: Mapping[str, Any], environ: Mapping[str, str], log: Path, kept_fd: int) -> None:
    words = [record["executable"], *record["words"], *record["arguments"]]
    sink = open_log(log)
    try:
        os.ftruncate(sink, 0)
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork():
                    os._exit(0)
                null = os.open(os.devnull, os.O_RDWR)
                for number, descriptor in enumerate((null, sink, sink)):
                    os.dup2(descriptor, number)
                close_descriptors(kept_fd)
                os.set_inheritable(kept_fd, True)
                os.execve(words[0], words, environ)
            finally:
                os._exit(127)
        reap(child, KILLED_S)
    finally:
        os.close(sink)
