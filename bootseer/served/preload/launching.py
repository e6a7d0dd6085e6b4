"""The launcher's side: begins the preloader of a start, where an earlier start has left a record.

The preloader is nobody's child, in a session of its own, as all that serves a job; it ends with the
process of the start. Main thread only: it forks.
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

from bootseer.errors import BootseerError
from bootseer.linux.private_files import is_own, private_directory, private_opener
from bootseer.linux.processes import start_time
from bootseer.linux.removal import remove_tree
from bootseer.served.preload import PYTHON_VARIABLE, SERVER_VARIABLE, VARIABLE, is_of_process
from bootseer.served.preload import shim as shim_module
from bootseer.served.preload.record import VERSION, digests_of, program_words
from bootseer.served.preload.shim import situation
from bootseer.settings.config import Settings

_TAKE_OVER_S = 1.0
"""For a lingering preloader to answer; it may still import."""
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
    kept = record_path(settings)
    private_directory(kept.parent)
    runs = private_directory(settings.run_dir / "preload")
    _sweep(runs)
    record = read_record(kept)
    folder = private_directory(runs / f"{os.getpid()}-{start_time(os.getpid())}")
    salt = secrets.token_hex(8)
    added = {VARIABLE: str(folder)}
    plan = {
        "job": settings.job,
        "pid": os.getpid(),
        "record": str(kept),
        "refused": str(kept.with_suffix(".refused.json")),
        "salt": salt,
        "variables": digests_of(environ, salt),
        "memory_bytes": settings.preload_limit_bytes,
        "linger_s": settings.linger_s,
        "program": record,
    }
    _write(folder / "plan", json.dumps(plan).encode())
    if record is None or not _is_startable(record):
        return added, ""
    _write(folder / "python", _shim(record["executable"]), 0o700)
    variables = _environment(record, {**environ, **added})
    if not _take_over(runs, folder, record["words"], variables):
        log = private_directory(settings.run_dir / "logs") / f"preload-{os.getpid()}.log"
        with _listener(folder) as listener:
            variables[SERVER_VARIABLE] = f"{folder}|{listener.fileno()}|1"
            _spawn(record, variables, log, listener.fileno())
    words = list(command)
    is_program = words[0] == record["executable"] and program_words(words) == record["words"]
    if not is_program or not os.access(folder / "python", os.X_OK):
        return added, ""
    return {**added, PYTHON_VARIABLE: record["executable"]}, str(folder / "python")


def let_go(settings: Settings) -> None:
    """End preloaders of the job that linger. Never raises."""
    with contextlib.suppress(OSError):
        for folder in _lingering(settings.run_dir / "preload", settings.job):
            _ask(folder, {"adopt": "", "descriptors": []})


def held(settings: Settings) -> Iterator[str]:
    """A sentence for each preloader of the job that lingers."""
    with contextlib.suppress(OSError):
        for folder in _lingering(settings.run_dir / "preload", settings.job):
            count, _, pid = (_ask(folder, {"status": True, "descriptors": []}) or "").partition(" ")
            if count != "0" and pid:
                yield f"imports: {count} modules are in process {pid}"
            else:
                yield "imports: not there yet"


def _take_over(runs: Path, folder: Path, words: list[str], variables: Mapping[str, str]) -> bool:
    """Have a preloader that lingers since the job's last start serve this one, at `folder`. One
    that was made for something else ends."""
    request = {
        **situation(),
        "adopt": str(folder),
        "words": words,
        "environment": {os.fsencode(name): os.fsencode(one) for name, one in variables.items()},
        "descriptors": [],
    }
    for other in _lingering(runs, json.loads((folder / "plan").read_bytes())["job"]):
        # Where the answer is yes, this is where its processes ask.
        os.link(other / "socket", folder / "socket")
        if _ask(other, request) is not None:
            return True
        (folder / "socket").unlink()
    return False


def _lingering(runs: Path, job: str) -> Iterator[Path]:
    """Folders of the job's preloaders whose launcher has ended."""
    for folder in runs.iterdir():
        pid, _, started = folder.name.partition("-")
        if not pid.isdigit() or start_time(int(pid)) == started:
            continue
        with contextlib.suppress(OSError, ValueError):
            if json.loads((folder / "plan").read_bytes())["job"] == job:
                yield folder


def _ask(folder: Path, request: dict[str, Any]) -> str | None:
    """What a preloader answers this process; None where it refuses, or does not answer."""
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
    """The variables of the last start's worker, as far as this start has not others."""
    missing = {name for name in record["missing"] if not is_of_process(name)}
    return {
        **{name: value for name, value in environ.items() if name not in missing},
        **record["extra"],
    }


def record_path(settings: Settings) -> Path:
    """Where a worker of the job writes what it has imported."""
    return settings.cache_dir / "preload" / f"{settings.job}.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of an earlier start; None where there is none that can be used."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            document = json.loads(file.read(_RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return document if _is_record(document) else None


def _is_record(document: Any) -> bool:
    """Whether it has all that is looked for in it: it may be another node's."""
    if not isinstance(document, dict) or document.get("version") != VERSION:
        return False
    lists = [document.get(n) for n in ("words", "arguments", "varying", "missing", "modules")]
    tables = [document.get(name) for name in ("extra", "changed")]
    texts = [document.get("executable"), document.get("salt")]
    return (
        all(isinstance(one, list) for one in lists)
        and all(isinstance(one, dict) for one in tables)
        and all(
            isinstance(text, str) and "\0" not in text
            for part in (*lists, *tables, *(one.values() for one in tables if one), texts)
            for text in part or ()
        )
        and bool(document["words"])
        and os.path.isabs(document["executable"])
    )


def _is_startable(record: Mapping[str, Any]) -> bool:
    executable = record["executable"]
    line = f"#!{executable} -ISE"
    return (
        len(line) <= _FIRST_LINE_MAX
        and " " not in executable
        and os.access(executable, os.X_OK, effective_ids=True)
    )


def _shim(executable: str) -> bytes:
    text = Path(shim_module.__file__).read_text(encoding="utf-8")
    return f"#!{executable} -ISE\n{text}".encode()


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _sweep(runs: Path) -> None:
    """Remove what preloaders that were killed have left; one that lingers holds a lock."""
    for folder in runs.iterdir():
        pid, _, started = folder.name.partition("-")
        if pid.isdigit() and start_time(int(pid)) != started:
            with contextlib.suppress(OSError, BootseerError):
                with _opened(os.open(folder, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)


def _listener(folder: Path) -> socket.socket:
    """Listens before there is a preloader: who asks early waits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _opened(folder) as directory:
        # The path of a socket has 108 bytes.
        listener.bind(f"/proc/self/fd/{directory}/socket")
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
