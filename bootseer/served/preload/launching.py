"""The launcher's side: begins the preloader of a start, where an earlier start has left a record.

The preloader is nobody's child, in a session of its own, as all that serves a job; it ends with the
process of the start. Main thread only: it forks.
"""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError
from bootseer.linux.private_files import is_own, private_directory, private_opener
from bootseer.linux.processes import start_time
from bootseer.linux.removal import remove_tree
from bootseer.served.preload import PYTHON_VARIABLE, SERVER_VARIABLE, VARIABLE, is_of_process
from bootseer.served.preload import shim as shim_module
from bootseer.served.preload.record import VERSION, digests_of, program_words
from bootseer.settings.config import Settings

_MEMORY_BYTES = 8 << 30
# execve(2): of a first line "#!" the kernel reads so much.
_FIRST_LINE_MAX = 127
_RECORD_BYTES_MAX = 8 << 20


def begin_preloader(
    settings: Settings, environ: Mapping[str, str], command: tuple[str, ...]
) -> tuple[dict[str, str], str]:
    """Begin the preloader of this start; `environ`: the environment that the command will have.

    Returns what to add to that environment, and the program to run in place of `command`'s first
    word, or "". Without a record of an earlier start nothing is begun: this one writes it.
    Raises: BootseerError, OSError; then there is no preloader.
    """
    kept = private_directory(settings.cache_dir / "preload")
    runs = private_directory(settings.run_dir / "preload")
    _sweep(runs)
    record = _read(kept / f"{settings.job}.json")
    folder = private_directory(runs / f"{os.getpid()}-{start_time(os.getpid())}")
    salt = secrets.token_hex(8)
    added = {VARIABLE: str(folder)}
    plan = {
        "job": settings.job,
        "pid": os.getpid(),
        "record": str(kept / f"{settings.job}.json"),
        "refused": str(kept / f"{settings.job}.refused.json"),
        "salt": salt,
        "variables": digests_of(environ, salt),
        "memory_bytes": _MEMORY_BYTES,
        "program": record,
    }
    _write(folder / "plan", json.dumps(plan).encode())
    if record is None or not _is_startable(record):
        return added, ""
    _write(folder / "python", _shim(record["executable"]), 0o700)
    log = private_directory(settings.run_dir / "logs") / f"preload-{os.getpid()}.log"
    with _listener(folder) as listener:
        where = f"{folder}|{listener.fileno()}|1"
        variables = _environment(record, {**environ, **added}, where)
        _spawn(record, variables, log, listener.fileno())
    words = list(command)
    is_program = words[0] == record["executable"] and program_words(words) == record["words"]
    if not is_program or not os.access(folder / "python", os.X_OK):
        return added, ""
    return {**added, PYTHON_VARIABLE: record["executable"]}, str(folder / "python")


def _environment(
    record: Mapping[str, Any], environ: Mapping[str, str], where: str
) -> dict[str, str]:
    """The variables of the last start's worker, as far as this start has not others."""
    missing = {name for name in record["missing"] if not is_of_process(name)}
    return {
        **{name: value for name, value in environ.items() if name not in missing},
        **record["extra"],
        SERVER_VARIABLE: where,
    }


def _read(path: Path) -> dict[str, Any] | None:
    """The record of an earlier start; None where there is none that can be used."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            document = json.loads(file.read(_RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    is_known = isinstance(document, dict) and document.get("version") == VERSION
    return document if is_known else None


def _is_startable(record: Mapping[str, Any]) -> bool:
    executable = record["executable"]
    line = f"#!{executable} -ISE"
    return len(line) <= _FIRST_LINE_MAX and " " not in executable and os.access(executable, os.X_OK)


def _shim(executable: str) -> bytes:
    text = Path(shim_module.__file__).read_text(encoding="utf-8")
    return f"#!{executable} -ISE\n{text}".encode()


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _sweep(runs: Path) -> None:
    """Remove what preloaders that were killed have left."""
    for folder in runs.iterdir():
        pid, _, started = folder.name.partition("-")
        if pid.isdigit() and start_time(int(pid)) != started:
            with contextlib.suppress(OSError, BootseerError):
                remove_tree(folder)


def _listener(folder: Path) -> socket.socket:
    """Listens before there is a preloader: who asks early waits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        # The path of a socket has 108 bytes.
        listener.bind(f"/proc/self/fd/{directory}/socket")
    finally:
        os.close(directory)
    listener.listen(128)
    return listener


def _spawn(record: Mapping[str, Any], environ: Mapping[str, str], log: Path, kept: int) -> None:
    """Start the interpreter as its program's, as nobody's child."""
    words = [record["executable"], *record["words"], *record["arguments"]]
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork():
                    os._exit(0)
                null = os.open(os.devnull, os.O_RDWR)
                for number, descriptor in enumerate((null, sink, sink)):
                    os.dup2(descriptor, number)
                os.closerange(3, kept)
                os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
                os.set_inheritable(kept, True)
                os.execve(words[0], words, environ)
            finally:
                os._exit(127)
        os.waitpid(child, 0)
    finally:
        os.close(sink)
