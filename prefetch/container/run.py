"""Running a command in an image: `bootseer image run`.

Two runtimes over the same root (`container`): runc where it is installed, which isolates
(`runtime_config`), or namespaces and a new root made here ("chroot"), which do not: files,
processes, host name and IPC are the container's own; network, devices and privileges the host's.
Main thread only; forks.
"""

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import InvalidInputError, UnsupportedError
from bootseer.linux import namespaces
from bootseer.prefetch.container import signals
from bootseer.prefetch.container.child import run_in_child
from bootseer.prefetch.container.container_start import Container, become, prepare_container
from bootseer.prefetch.container.oci_runtime import Log, exec_runc
from bootseer.prefetch.serve.serve_plan import DEFAULTS, ServeOptions
from bootseer.served.folders import wait_released
from bootseer.served.processes import Process
from bootseer.settings.config import Settings

RUNTIMES = ("auto", "runc", "chroot")
_SERVER_END_S = 15.0

_log = logging.getLogger(__name__)


def choose_runtime(wanted: str) -> str:
    """ "runc" or "chroot"; with a warning where "auto" finds no better one.

    Raises: InvalidInputError, UnsupportedError.
    """
    if wanted not in RUNTIMES:
        raise InvalidInputError(f"runtime is {wanted!r}; use one of {', '.join(RUNTIMES)}")
    usable = os.geteuid() == 0 and shutil.which("runc") is not None
    if wanted == "runc" and not usable:
        raise UnsupportedError("the runtime runc must be installed, and needs root; use chroot")
    if wanted != "auto":
        return wanted
    if not usable:
        lacking = "runc is not installed" if os.geteuid() == 0 else "runc needs root"
    elif not os.access("/sys/fs/cgroup", os.W_OK):
        lacking = "runc needs /sys/fs/cgroup, which cannot be written here"
    else:
        return "runc"
    _log.warning(
        "%s: the command runs without isolation, with this host's network, devices and privileges; "
        "--runtime chroot asks for that, --runtime runc refuses it",
        lacking,
    )
    return "chroot"


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
    entrypoint: str | None = None,
    process: Process | None = None,
) -> int:
    """Run `command` (default: the image's own) in the image; returns its exit code. `entrypoint`:
    see `arguments_of`. `process` serves it, if one was begun.

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
        spec = container.spec(command, variables, user, entrypoint)
        if chosen == "runc":
            with Log() as log:
                code = run_in_child(lambda: exec_runc(container, spec, log))
                if code:
                    log.raise_failure(spec.arguments[0])
                return code
        return run_in_child(lambda: _namespaced(container, command, variables, user, entrypoint))
    finally:
        if container.image.state_dir.exists():
            container.close()
            # The namespace is gone: the server notices, and takes its folders with it.
            wait_released(container.image.state_dir, _SERVER_END_S)


def _namespaced(
    container: Container,
    command: Sequence[str],
    variables: Mapping[str, str],
    user: str | None,
    entrypoint: str | None,
) -> int:
    """In a child: namespaces, then a first process for them that builds the root and runs the
    command; its exit code."""
    extra = namespaces.CLONE_NEWPID | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC
    container.unshare(extra)

    def first_process() -> int:
        # /proc shows the PID namespace of the process that mounts it: that is us.
        container.build(own_pids=True)
        spec = container.spec(command, variables, user, entrypoint)
        namespaces.change_root(container.root)

        def program() -> int:
            signals.restore()
            become(spec, rootless=container.rootless)

        return run_in_child(program)

    return run_in_child(first_process)
