"""Python programs started as forks of a process that has imported Bootseer.

An interpreter takes 80 to 120 ms of processor time to load the command line; a fork of a process
that has loaded it takes a tenth of that. `Popen` is `subprocess.Popen`, and forks if the command is
this interpreter with `-m MODULE` or `-c CODE`; `posix_spawn` does so for the servers that the
product starts in the tests' own process. The forked process is the caller's child, and has
the requested arguments, environment, directory, standard files, session and user, also in /proc.
`Popen` starts a fresh interpreter where a fork would differ from it (other options, encodings,
warnings, namespaces, passed descriptors), or where the kernel does not let a process change its
command line. `failures` tells why a fork did not succeed.

Thread-safe. A test of how the interpreter starts uses the fixture `fresh_interpreters`.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import bootseer
from testbed.paths import REPOSITORY
from testbed.waiting import polling

_WORDS = ("-m", "-c")
_OPTIONS: tuple[list[str], ...] = ([], ["-P"])
"""Options that a fork of the zygote obeys."""
_DUP2 = os.POSIX_SPAWN_DUP2
_OWN_FD = 10
_FILES_MAX = 8
_TEXT_LOCALES = {"", "C", "POSIX", "C.UTF-8"}
"""Locales that Python treats alike: UTF-8, with `surrogateescape` for other bytes."""
_PYTHON_VARIABLES = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
"""Variables of the interpreter that a fork obeys; PYTHONPATH may name the checkout."""
_LINKER_VARIABLES = ("LD_", "MALLOC_", "GLIBC_")
_REQUEST_BYTES_MAX = 100_000
_ANSWER_S = 60.0
_PREPARED_S = 300.0
_READY = "ready"
_REASON_BYTES = 1000
_SHOWN_CHARACTERS = 60
_THREADS_END_S = 5.0
_NAMESPACES = ("mnt", "net", "pid", "user")

_NOT_IMPORTED = (
    "bootseer.demo.",
    "bootseer.__main__",
    "bootseer.fuse.striped.group.channel",
    "bootseer.fuse.striped.group.loading",
    "bootseer.fuse.striped.group.reader",
    "bootseer.profile.collect.path",
)
"""Modules that are programs, and modules that need torch."""
_IMPORTED_TOO = ("rich.console", "rich.table", "rich._unicode_data", "encodings.idna", "fsspec")

# linux/sched.h, linux/prctl.h, and the number of clone3 on every architecture.
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE3 = 435
_PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 35, 14, 40


# ---- the client: a process that starts programs ------------------------------------------------


_execute_child_fresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_EXECUTE_PARAMETERS = inspect.getfullargspec(_execute_child_fresh).args[1:]


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks the zygote where it can (see the module's docstring)."""

    def _execute_child(self, *given: Any) -> None:
        request = dict(zip(_EXECUTE_PARAMETERS, given, strict=True))
        pid = _start(request) if _is_plain(request) else None
        if pid is None:
            _execute_child_fresh(self, *given)
            return
        self.pid = pid
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(request[end] for end in ends))  # type: ignore[attr-defined]


_posix_spawn_fresh: Callable[..., int] = os.posix_spawn


def posix_spawn(
    path: Any, arguments: Any, environment: Mapping[Any, Any] | None, /, **options: Any
) -> int:
    """`os.posix_spawn` that forks the zygote for a server of Bootseer (`served.processes`)."""
    actions = options.get("file_actions", ())
    files = [one[1] for number, one in enumerate(actions) if one[::2] == (_DUP2, number)]
    if (
        path == sys.executable
        and set(options) == {"file_actions", "setsid", "setsigmask"}
        and len(files) == len(actions) >= 3
    ):
        request = {
            "args": arguments,
            "env": environment,
            "files": files,
            "cwd": None,
            "start_new_session": options["setsid"],
            "uid": None,
            "gid": None,
            "gids": None,
        }
        if (pid := _start(request)) is not None:
            return pid
    return _posix_spawn_fresh(path, arguments, environment, **options)


def install() -> None:
    """Make `subprocess` start every process of this process by `Popen`, and servers by a fork."""
    subprocess.Popen = Popen  # type: ignore[misc]
    os.posix_spawn = posix_spawn
    # In a fork of a process that had a zygote itself, that zygote is the other process's.
    _clients[:] = [_Client()]


def fork_for(code: str, module: str, *arguments: str) -> None:
    """Start programs with the options `-u -c CODE` as forks of `python -m MODULE FD ARGUMENTS`.

    That program prepares itself and calls `serve`.
    """
    _clients.append(_Client(("-u", "-c", code), module, arguments))


@contextlib.contextmanager
def without_zygote() -> Iterator[None]:
    """Start fresh interpreters for the length of the block."""
    kept = _clients[:]
    _clients.clear()
    try:
        yield
    finally:
        _clients[:] = kept


class _Client:
    """A zygote of this process, started at the first command that it can fork."""

    def __init__(
        self,
        words: Sequence[str] = (),
        module: str = "testbed.zygote",
        arguments: Sequence[str] = (),
    ) -> None:
        """Fork the zygote `python -m MODULE FD ARGUMENTS` for commands.

        `words`: all words of these commands behind the interpreter; by default they begin with
        `-m`, `-c` or `-P -m`.
        """
        self._words = list(words)
        self._module, self._arguments = module, arguments
        self._is_able = True
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        # Not those of the first command, which may be in a test's own network.
        self._namespaces = _namespaces()

    def start(self, request: Mapping[str, Any]) -> int | None:
        """Fork the program that `Popen` is to execute; return its id, or None if it cannot."""
        environment = os.environ if request["env"] is None else request["env"]
        if os.getpid() != self._owner or not self._is_for(request["args"], environment):
            return None
        directory = os.fsdecode(request["cwd"] or "")
        wished = {
            "arguments": [os.fsdecode(word) for word in request["args"]],
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
            "directory": directory if os.path.isabs(directory) else str(Path(directory).absolute()),
            "session": request["start_new_session"],
            "user": request["uid"],
            "group": request["gid"],
            "groups": request["gids"],
            "umask": _umask(),
        }
        text = json.dumps(wished).encode("ascii")
        if len(text) > _REQUEST_BYTES_MAX:
            return None
        with self._lock:
            if _namespaces() != self._namespaces:
                return None
            if self._socket is None:
                self._socket = self._begin()
            if not self._is_able:
                return None
            try:
                socket.send_fds(self._socket, [text], request["files"])
                answer = self._socket.recv(_REASON_BYTES).decode()
            except BaseException:
                # The next one would get the late answer to this one.
                self._is_able = False
                raise
        pid, _, reason = answer.partition(" ")
        if int(pid) > 0:
            return int(pid)
        if int(pid) < 0:
            os.waitpid(-int(pid), 0)
        failures.append(f"{' '.join(wished['arguments'][1:])[:_SHOWN_CHARACTERS]}: {reason}")
        return None

    def _is_for(self, arguments: Sequence[Any], environment: Mapping[Any, Any]) -> bool:
        words = [os.fsdecode(word) for word in arguments[:4]]
        return (
            len(words) >= 3
            and words[0] == sys.executable
            and (words[1:] == self._words or (not self._words and _split(words)[0] in _OPTIONS))
            and all(_is_neutral(os.fsdecode(k), os.fsdecode(v)) for k, v in environment.items())
        )

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                cwd="/",
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)
        ours.settimeout(_PREPARED_S)
        said = ours.recv(_REASON_BYTES).decode()
        if not said:
            # Fresh interpreters in its place would take the tests twice the processor time.
            raise RuntimeError(f"{self._module} has ended with {self._process.wait(60)}")
        self._is_able = said == _READY
        if not self._is_able:
            failures.append(f"any program of this process: {said}")
        ours.settimeout(_ANSWER_S)
        return ours

    def _end(self) -> None:
        if os.getpid() == self._owner and self._socket and self._process:
            self._socket.close()
            self._process.wait(60)


_clients: list[_Client] = []
failures: list[str] = []
"""Programs for which this process had to start a fresh interpreter, each with the reason."""


def _start(request: Mapping[str, Any]) -> int | None:
    """Fork the first zygote that can be this program; return the process id, or None."""
    return next((pid for one in _clients if (pid := one.start(request)) is not None), None)


def _is_plain(request: dict[str, Any]) -> bool:
    """Return whether a request of `Popen` has no options that a zygote does not know.

    Adds the descriptors of its standard files.
    """
    ends = ("p2cread", "c2pwrite", "errwrite")
    request["files"] = [request[end] if request[end] != -1 else own for own, end in enumerate(ends)]
    return (
        not isinstance(request["args"], str | bytes | os.PathLike)
        and not request["shell"]
        and request["executable"] is None
        and request["preexec_fn"] is None
        and not request["pass_fds"]
        and request["close_fds"]
        and request["umask"] == -1
        and request["process_group"] in (None, -1)
        and Path(os.fsdecode(request["cwd"] or "/")).is_dir()
    )


def _is_neutral(name: str, value: str) -> bool:
    """Return whether a fork behaves like a fresh interpreter with this variable."""
    if name == "PYTHONPATH":
        return set(value.split(os.pathsep)) == {str(REPOSITORY)}
    if name.startswith("PYTHON"):
        return name in _PYTHON_VARIABLES
    if name == "LANG" or name.startswith("LC_"):
        return value in _TEXT_LOCALES
    return not name.startswith(_LINKER_VARIABLES)


def _umask() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise RuntimeError("/proc/self/status does not show the umask")


def _namespaces() -> list[str]:
    return [str(Path("/proc/thread-self/ns", name).readlink()) for name in _NAMESPACES]


# ---- the process that forks -------------------------------------------------------------------

_library = ctypes.PyDLL(None, use_errno=True)
"""The C library, called with the interpreter's lock held."""
_library.sbrk.restype = ctypes.c_void_p
_timed: list[Any] = []
"""Modules that hold the time at which `bootseer` was imported."""


def main() -> None:
    """Import the product and serve."""
    _import_all()
    serve(int(sys.argv[1]))


def serve(descriptor: int) -> None:
    """Answer requests on the socket `descriptor` until it is closed."""
    # Not one of the numbers that a program's files get.
    channel = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _OWN_FD))
    os.close(descriptor)
    address = ctypes.c_ulong()
    channel.send((_hindrance(address) or _READY).encode()[:_REASON_BYTES])
    gc.collect()
    gc.freeze()
    while True:
        text, files, _, _ = socket.recv_fds(channel, _REQUEST_BYTES_MAX, _FILES_MAX)
        if not text:
            return
        pid = _fork(address.value)
        if pid == 0:
            _become(json.loads(text), files, channel)
        if pid < 0:
            reason = f"0 cannot fork: {os.strerror(ctypes.get_errno())}"
            channel.send(reason.encode()[:_REASON_BYTES])
        for descriptor in files:
            os.close(descriptor)


def _hindrance(tid_address: ctypes.c_ulong) -> str:
    """Find the address for `_fork`; return the reason why this process cannot serve, or ""."""
    if _library.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid_address), 0, 0, 0):
        return "the kernel does not tell at which address it clears a thread's id"
    try:
        _set_process_name(sys.orig_argv, os.environ)
    except OSError as error:
        return str(error)
    # On a busy machine a thread of an import may still be ending.
    if not any(len(os.listdir("/proc/self/task")) == 1 for _ in polling(_THREADS_END_S)):
        threads = Path("/proc/self/task").glob("*/comm")
        return f"imports have left threads: {[one.read_text().strip() for one in threads]}"
    return ""


def _import_all() -> None:
    for module in pkgutil.walk_packages(bootseer.__path__, "bootseer."):
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    for name in _IMPORTED_TOO:
        importlib.import_module(name)
    # Not of all modules: one that is loaded lazily would import others at the question.
    own = [one for name, one in sys.modules.items() if name.startswith("bootseer")]
    _timed.extend(one for one in own if hasattr(one, "loaded_ns"))


def _fork(tid_address: int) -> int:
    """Fork with this process's parent as the child's parent. Single-threaded."""
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID
    arguments = (ctypes.c_uint64 * 8)(flags, 0, tid_address)
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = int(_library.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))
    if pid == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    return pid


def _become(request: dict[str, Any], files: Sequence[int], channel: socket.socket) -> NoReturn:
    """Run the requested program in this process, and exit."""
    try:
        _set_up(request, files)
    except BaseException as error:
        reason = f"-{os.getpid()} {type(error).__name__}: {error}"
        channel.send(reason.encode(errors="replace")[:_REASON_BYTES])
        os._exit(1)
    channel.send(str(os.getpid()).encode("ascii"))
    channel.close()
    code = _code_of(*_split(sys.orig_argv)[1][:2])
    # End as the interpreter does, without freeing all modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if code is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def _set_up(request: dict[str, Any], files: Sequence[int]) -> None:
    environment, arguments = request["environment"], request["arguments"]
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _OWN_FD) for one in files]
    for descriptor in files:
        os.close(descriptor)
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _set_process_name(arguments, environment)
    os.environ.clear()
    os.environ.update(environment)
    if not environment.get("LC_ALL"):
        locale = environment.get("LC_CTYPE") or environment.get("LANG") or "C"
        if locale in ("C", "POSIX"):
            # The interpreter does this at its start (PEP 538).
            os.environ["LC_CTYPE"] = "C.UTF-8"
    time.tzset()
    os.umask(request["umask"])
    os.chdir(request["directory"])
    if request["session"]:
        os.setsid()
    if request["groups"] is not None:
        os.setgroups(request["groups"])
    if request["group"] is not None:
        os.setresgid(*[request["group"]] * 3)
    if request["user"] is not None:
        os.setresuid(*[request["user"]] * 3)
    for module in _timed:
        module.loaded_ns = time.time_ns()
    sys.orig_argv[:] = arguments
    options, words = _split(arguments)
    is_unbuffered = "-u" in options
    sys.argv[:] = words[:1] + words[2:]
    if "-P" in options:
        del sys.path[0]
    else:
        sys.path[0] = str(Path.cwd()) if words[0] == "-m" else ""
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    _open_standard_files(is_unbuffered or bool(environment.get("PYTHONUNBUFFERED")))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter's options, and the words from `-m` or `-c` on."""
    numbers = (number for number, word in enumerate(arguments) if word in _WORDS)
    first = next(numbers, len(arguments))
    return arguments[1:first], arguments[first:]


class _PrctlMemoryMap(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk"),
                *("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


# Memory from which /proc reads the command line and environment, kept alive.
_kept_buffers: list[object] = []


def _set_process_name(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set /proc/self/cmdline and /proc/self/environ. Raises: OSError."""
    variables = (f"{name}={value}" for name, value in environment.items())
    argument_bytes, variable_bytes = (
        b"".join(os.fsencode(word) + b"\0" for word in words) for words in (arguments, variables)
    )
    buffer = ctypes.create_string_buffer(argument_bytes + variable_bytes)
    _kept_buffers.append(buffer)
    start = ctypes.addressof(buffer)
    middle = start + len(argument_bytes)
    # Fields 26 to 28, and 45 to 47, of proc_pid_stat(5) stay as they are.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    numbers = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47)]
    places = (start, middle, middle, middle + len(variable_bytes))
    known = _PrctlMemoryMap(
        *numbers, _library.sbrk(0), int(fields[28 - 3]), *places, 0, 0, 0xFFFFFFFF
    )
    if _library.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(known), ctypes.sizeof(known), 0):
        raise OSError(ctypes.get_errno(), "the kernel does not let a process change its name")


def _open_standard_files(unbuffered: bool) -> None:
    """Open stdin, stdout and stderr as the interpreter does: terminals are line-buffered."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        new = io.TextIOWrapper(
            raw
            if number and unbuffered
            else (io.BufferedWriter if number else io.BufferedReader)(raw),
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered,
        )
        new.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _code_of(word: str, what: str) -> int | None:
    """Run the module or the code; return its exit code, or None if SIGINT ended it."""
    try:
        if word == "-m":
            # A module that is imported already would be there twice, and runpy warns of that.
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), module.__dict__)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(_own_part(error.__traceback__)), None)
        return None if isinstance(error, KeyboardInterrupt) else 1
    return 0


_BEFORE = {function.__code__.co_filename for function in (main, runpy.run_module)}


def _own_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of the traceback that begins with the program's own calls."""
    while trace and trace.tb_frame.f_code.co_filename in _BEFORE:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
