"""Running a command in an image: `bootseer image run`.

Two runtimes over the same root (`container`): runc where it is installed, with its isolation, or
namespaces and a new root made here ("chroot"): own files, processes, host name and IPC; network,
devices and privileges are the host's. Main thread only; forks.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bootseer.config import Settings
from bootseer.errors import InvalidInputError, UnsupportedError
from bootseer.prefetch import namespaces, signals
from bootseer.prefetch.container import Container, become, prepare_container
from bootseer.prefetch.mount_state import wait_released
from bootseer.prefetch.oci_runtime import exec_runc
from bootseer.prefetch.serve_plan import DEFAULTS, ServeOptions
from bootseer.prefetch.server_process import ServerProcess
from bootseer.reported import error_from_json, error_to_json

RUNTIMES = ("auto", "runc", "chroot")
_SERVER_END_S = 15.0
_REPORT_BYTES_MAX = 1 << 16


def choose_runtime(wanted: str) -> str:
    """ "runc" or "chroot". Raises: InvalidInputError, UnsupportedError."""
    if wanted not in RUNTIMES:
        raise InvalidInputError(f"runtime is {wanted!r}; use one of {', '.join(RUNTIMES)}")
    usable = os.geteuid() == 0 and shutil.which("runc") is not None
    if wanted == "runc" and not usable:
        raise UnsupportedError("the runtime runc must be installed, and needs root; use chroot")
    if wanted == "auto":
        return "runc" if usable and os.access("/sys/fs/cgroup", os.W_OK) else "chroot"
    return wanted


def run_image(
    settings: Settings,
    reference: str,
    command: Sequence[str],
    options: ServeOptions = DEFAULTS,
    *,
    runtime: str = "auto",
    binds: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
    process: ServerProcess | None = None,
) -> int:
    """Run `command` (default: the image's own) in the image; returns its exit code. `process`
    serves it, if one was begun.

    Signals that this process gets are passed on. Nothing of the container outlives the call.
    Raises: as `prepare_container`; SetupFailedError with 126 or 127 where the command cannot be
    started; UnsupportedError.
    """
    chosen = choose_runtime(runtime)
    container = prepare_container(settings, reference, options, binds=binds, process=process)
    variables = dict(environment or {})
    if sys.stdin.isatty() and "TERM" in os.environ:
        variables.setdefault("TERM", os.environ["TERM"])
    try:
        spec = container.spec(command, variables, user)
        if chosen == "runc":
            return _fork(lambda: exec_runc(container, spec))
        return _fork(lambda: _namespaced(container, command, variables, user))
    finally:
        if container.image.state_dir.exists():
            container.close()
            # The namespace is gone: the server notices, and takes its folders with it.
            wait_released(container.image.state_dir, _SERVER_END_S)


def _fork(child: Callable[[], int]) -> int:
    """Run `child` in a process; its exit code. Raises what it raised before it was under way."""
    parent = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signals.block()
    try:
        pid = os.fork()
        if not pid:
            os.close(read_fd)
            _child(child, parent, write_fd)
        os.close(write_fd)
        code = signals.forward_until_exit(pid)
        with os.fdopen(read_fd, "rb") as pipe:
            report = pipe.read(_REPORT_BYTES_MAX)
        if report:
            raise error_from_json(json.loads(report))
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _child(work: Callable[[], int], parent: int, report_fd: int) -> None:
    """Never returns."""
    code = 1
    try:
        namespaces.die_with_parent(parent)
        code = work()
    except BaseException as error:
        os.write(report_fd, json.dumps(error_to_json(error, "the run")).encode())
    finally:
        os._exit(code)


def _namespaced(
    container: Container,
    command: Sequence[str],
    variables: Mapping[str, str],
    user: str | None,
) -> int:
    """In a child: namespaces, then a first process for them that builds the root and runs the
    command; its exit code."""
    extra = namespaces.CLONE_NEWPID | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC
    container.unshare(extra)

    def first_process() -> int:
        # /proc shows the PID namespace of whoever mounts it: that is us.
        namespaces.set_host_name(Path(container.image.state_dir).name[:12])
        container.build(own_pids=True)
        spec = container.spec(command, variables, user)
        namespaces.change_root(container.root)

        def program() -> int:
            signals.restore()
            become(spec, rootless=container.rootless)

        return _fork(program)

    return _fork(first_process)
