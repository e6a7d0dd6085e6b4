"""Stand-in for a worker that a launcher starts. The preloader forks the worker.

The stand-in passes signals on to the worker, and ends as the worker ends.

Run by its first line as the job's interpreter with `-ISE`, and imports almost nothing, since a
worker waits for it. If no worker is forked it becomes the ordinary interpreter, after one line on
standard error.
"""

import marshal
import posix
import sys
from typing import Any, NoReturn

_PYTHON = b"BOOTSEER_PRELOAD_PYTHON"
_EXECUTABLE = b"PYTHON_EXEC"
_WAIT_S = 30.0
SIGTERM, SIGKILL, SIGCONT, SIGSTOP, SIGCHLD = 15, 9, 18, 19, 17
# Signals that a launcher sends to a worker's process group.
_GROUP_SIGNALS = (1, 2, 3, SIGTERM, SIGCONT)
_DESCRIPTORS_MAX = 200
_STOPPING = bytes(2)
"""Message of the stand-in that it stops, as the guard has asked; earlier messages were sent before.
"""


def read(path: str) -> bytes:
    """Return the contents of a file in /proc; empty if there is none."""
    try:
        descriptor = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = b""
        while piece := posix.read(descriptor, 1 << 16):
            data += piece
        return data
    finally:
        posix.close(descriptor)


def inherited_attributes() -> dict[str, Any]:
    """Return the attributes that a fork of the preloader must have or take over."""
    kept = (b"Uid", b"Gid", b"Groups", b"Cap", b"NoNewPrivs", b"Seccomp", b"Mems_allowed_list")
    lines = read("/proc/self/status").splitlines()
    status = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    namespaces = {}
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        try:
            namespaces[name] = posix.readlink(f"/proc/self/ns/{name}")
        except OSError:
            namespaces[name] = ""
    fixed = {
        "user or rights": [line for line in lines if line.startswith(kept)],
        "namespaces": namespaces,
        "control group": read("/proc/self/cgroup"),
        "root folder": posix.stat("/").st_ino,
        "personality": read("/proc/self/personality"),
        "scheduling": (posix.sched_getscheduler(0), posix.sched_getparam(0)[0]),
        "memory policy": read("/proc/self/numa_maps").partition(b"\n")[0].split()[1:2],
    }
    return {
        "fixed": fixed,
        "limits": read("/proc/self/limits"),
        "nice": posix.getpriority(posix.PRIO_PROCESS, 0),
        "affinity": sorted(posix.sched_getaffinity(0)),
        "oom_score_adj": read("/proc/self/oom_score_adj"),
        "umask": int(status.get(b"Umask", b"22"), 8),
        "ignored": int(status.get(b"SigIgn", b"0"), 16),
        "blocked": int(status.get(b"SigBlk", b"0"), 16),
    }


def leads_session() -> bool:
    """Return whether this process leads a session and has no terminal."""
    fields = read("/proc/self/stat").rpartition(b")")[2].split()
    return int(fields[3]) == posix.getpid() and int(fields[4]) == 0


def main() -> NoReturn:
    """Have the preloader fork the worker, and stand in for it; else start ordinarily."""
    connection = None
    try:
        connection, reason = _ask()
    except OSError as error:
        reason = f"the preloader does not answer ({error.strerror or error})"
    except Exception as error:
        reason = str(error)
    if connection is None:
        _start_ordinarily(reason)
    _stand_for(connection)


def _start_ordinarily(reason: str) -> NoReturn:
    environment = own_environment()
    if environment.get(b"LOCAL_RANK", b"0") == b"0":
        posix.write(2, f"bootseer: started without the preloader: {reason}\n".encode())
    python = posix.environ.get(_PYTHON) or sys.executable.encode()
    posix.execve(python, [python, *map(_bytes, sys.argv[1:])], environment)


def own_environment() -> dict[bytes, bytes]:
    """Return the variables for the worker, without those that are for launchers."""
    ours = (_PYTHON, _EXECUTABLE)
    return {name: value for name, value in posix.environ.items() if name not in ours}


def _bytes(word: str) -> bytes:
    return word.encode(errors="surrogateescape")


def _ask() -> tuple[Any, str]:
    """Return a connection to the guard of the forked worker, or None and the reason."""
    import _socket

    if not leads_session():
        raise ValueError("only the leader of a session without a terminal can be forked")
    if _bytes(sys.executable) != posix.environ.get(_PYTHON):
        raise ValueError("the modules were imported by another interpreter")
    request = inherited_attributes()
    request["words"] = sys.argv[1:]
    request["environment"] = own_environment()
    names = [int(name) for name in posix.listdir("/proc/self/fd")]
    numbers = [number for number in sorted(names) if _is_open(number)]
    request["descriptors"] = numbers
    if not {0, 1, 2}.issubset(numbers) or len(numbers) > _DESCRIPTORS_MAX:
        raise ValueError("a standard file is closed, or too many files are open")
    # The folder of this file: a launcher's BOOTSEER_PRELOAD names its workers' folder.
    folder = posix.open(sys.argv[0].rpartition("/")[0], posix.O_PATH | posix.O_CLOEXEC)
    directory = posix.open(".", posix.O_PATH | posix.O_CLOEXEC)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    connection.settimeout(_WAIT_S)
    # A socket's address is limited to 108 bytes.
    connection.connect(f"/proc/self/fd/{folder}/socket")
    credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != posix.geteuid():
        raise ValueError("another user answers")
    data = marshal.dumps(request)
    sent = b"".join(n.to_bytes(4, sys.byteorder) for n in [*numbers, directory])
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)]
    connection.sendmsg([len(data).to_bytes(8, "big")], rights)
    connection.sendall(data)
    answer = connection.recv(4096)
    if answer[:1] != b"F":
        reason = answer[1:].decode(errors="replace") or "the preloader has ended"
        return None, reason
    posix.close(folder)
    posix.close(directory)
    return connection, ""


def _is_open(number: int) -> bool:
    try:
        posix.fstat(number)
    except OSError:
        return False  # the descriptor of the listing itself
    return True


def _stand_for(connection: Any) -> NoReturn:
    """Pass signals on to the worker's guard, and end as the worker ends."""
    import _signal  # type: ignore[import-not-found]
    import select

    reader, writer = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in range(1, _signal.NSIG):
        if number not in (SIGKILL, SIGSTOP, SIGCHLD):
            try:
                # SIGCONT even if it is ignored: it tells the guard that the stand-in goes on.
                if _signal.getsignal(number) != _signal.SIG_IGN or number in (13, SIGCONT, 25):
                    _signal.signal(number, lambda *_: None)
            except (OSError, ValueError):
                continue
    connection.sendall(b"G")
    # From now on only the worker has its files open.
    null = posix.open("/dev/null", posix.O_RDWR)
    for name in posix.listdir("/proc/self/fd"):
        if int(name) not in (null, reader, writer, connection.fileno()):
            try:
                posix.dup2(null, int(name)) if int(name) < 3 else posix.close(int(name))
            except OSError:
                continue
    connection.settimeout(None)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(connection.fileno(), select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == reader:
                for number in posix.read(reader, 512):
                    send(connection, bytes((number, number in _GROUP_SIGNALS)))
            else:
                answer = connection.recv(5)
                if answer[:1] == b"S":
                    send(connection, _STOPPING)
                    posix.kill(posix.getpid(), SIGSTOP)
                else:
                    _end_as(answer)


def send(connection: Any, data: bytes) -> None:
    """Send data to the other side; do nothing if it has closed the connection."""
    try:
        connection.sendall(data)
    except OSError:
        return  # the next read reports the end of the other side


def _end_as(answer: bytes) -> NoReturn:
    """End as the worker did; by SIGKILL if the guard was killed, and the worker with it."""
    import _signal

    status = int.from_bytes(answer[1:5], "big") if answer[:1] == b"E" else SIGKILL
    if not posix.WIFSIGNALED(status):
        posix._exit(posix.WEXITSTATUS(status))
    number = posix.WTERMSIG(status)
    # No core file of the stand-in: the worker has written its own, if that is enabled.
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (SIGKILL, SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [number])
    posix.kill(posix.getpid(), number)
    posix._exit(128 + number)


if __name__ == "__main__":
    main()
