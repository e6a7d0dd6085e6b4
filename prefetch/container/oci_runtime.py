"""Running a container with runc: making its bundle, becoming it, and saying why it did not start.

What runc is told is in `runtime_config`. All but `Log` acts in the child that `run` forked.
"""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.errors import CorruptError, SetupFailedError, UnsupportedError, from_oserror
from bootseer.linux import namespaces
from bootseer.prefetch.container import signals
from bootseer.prefetch.container.child import try_in_child
from bootseer.prefetch.container.container_root import Bind, bind_into, host_binds
from bootseer.prefetch.container.process_spec import ProcessSpec, execute, take_identity
from bootseer.prefetch.container.runtime_config import (
    BOUND_SYSFS,
    FRESH_SYSFS,
    BoundPath,
    Device,
    runtime_config,
)

if TYPE_CHECKING:
    from types import TracebackType

    from bootseer.prefetch.container.container_start import Container

_DELETE_S = 20
_LOG_BYTES_MAX = 1 << 20


class _LogLine(Struct, frozen=True):
    level: str = ""
    msg: str = "it did not say why"


_LOG_LINE: Form[_LogLine] = Form(type=_LogLine, size_max=_LOG_BYTES_MAX, is_foreign=True)


class Log:
    """What runc says of itself, in memory: the container's folder goes before it can be read."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("runc-log", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        os.close(self._fd)

    def raise_failure(self, program: str) -> None:
        """Raises: SetupFailedError with 126 where runc could not start `program`."""
        for line in os.pread(self._fd, _LOG_BYTES_MAX, 0).splitlines():
            with contextlib.suppress(CorruptError):
                entry = _LOG_LINE.decode(line, "runc's log")
                if entry.level not in ("error", "fatal"):
                    continue
                # Its last clause is the reason; the ones before say in which of its steps.
                reason = entry.msg.strip()
                if "exec" in reason:
                    reason = reason.rpartition(": ")[2]
                raise SetupFailedError(f"runc cannot run {program} of the image: {reason}", 126)


def exec_runc(container: "Container", spec: ProcessSpec, log: Log) -> NoReturn:
    """Build the root in a mount namespace and become `runc run` over it.

    Raises: SetupFailedError with 126 or 127 where there is no such program; BootseerError.
    """
    container.unshare()
    container.build(own_pids=False, furnished=False)
    try_in_child(lambda: _become_program(container, spec))
    state_dir = container.image.state_dir
    runc = shutil.which("runc")
    if runc is None:
        raise UnsupportedError("runc is not installed; use --runtime chroot")
    try:
        bundle = state_dir / "bundle"
        bundle.mkdir(mode=0o700)
        config = runtime_config(
            spec,
            str(container.root),
            _bound_paths([*host_binds(), *container.binds], bundle),
            terminal=sys.stdin.isatty() and sys.stdout.isatty(),
            sysfs=_sysfs(bundle),
        )
        (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")
        signals.restore()
        arguments = [runc, "--root", str(state_dir / "runc"), "--log", log.path]
        arguments += ["--log-format", "json", "run", "--bundle", str(bundle), _name(state_dir)]
        os.execv(runc, arguments)
    except OSError as error:
        raise from_oserror(error, f"run {runc}") from error


def _bound_paths(binds: Sequence[Bind], bundle: Path) -> list[BoundPath]:
    """What runc is to bind. Its "ro" leaves writable what is mounted below a bind's source, so it
    gets read-only views, which lie in `bundle`. Raises: OSError."""
    found = []
    for number, bind in enumerate(binds):
        source = bind.source
        if bind.read_only:
            view = bundle / f"bind-{number}"
            if source.is_dir():
                view.mkdir()
            else:
                view.touch()
            namespaces.bind_read_only(source, view)
            source = view
        found.append(BoundPath(str(source), bind.target, bind.read_only, _device(bind.source)))
    return found


def _device(path: Path) -> Device | None:
    status = path.stat()
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return None
    kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
    return Device(kind, os.major(status.st_rdev), os.minor(status.st_rdev))


def _sysfs(bundle: Path) -> str:
    """Whether the kernel makes a new sysfs here: not for a network of another user namespace, as
    in a container that is itself in one. Raises: OSError."""
    probe = bundle / "sysfs"
    probe.mkdir()
    try:
        namespaces.mount("sysfs", probe, "sysfs", namespaces.MS_RDONLY)
    except PermissionError:
        return BOUND_SYSFS
    namespaces.unmount(probe)
    return FRESH_SYSFS


def _become_program(container: "Container", spec: ProcessSpec) -> NoReturn:
    """In a child, and not for long: what runc will do, which exits with 1 where it cannot. That
    could be the program's own code.

    Raises: as `execute`; BootseerError.
    """
    try:
        if container.binds:
            namespaces.unshare(namespaces.CLONE_NEWNS)
            namespaces.make_private()
            for bind in container.binds:
                bind_into(container.root, bind)
        os.chroot(container.root)
        # As root, which need not be able to enter it; runc makes one that is missing.
        with contextlib.suppress(FileNotFoundError):
            os.chdir(spec.working_dir)
        take_identity(spec.user)
    except OSError as error:
        raise from_oserror(error, f"look for {spec.arguments[0]} in the container") from error
    execute(spec)


def _name(state_dir: Path) -> str:
    return f"bootseer-{state_dir.name}"


def end_left_over(state_dir: Path) -> None:
    """Kill a container whose runc was killed; nothing where there is none. Never raises."""
    runc = shutil.which("runc")
    if runc is None or not (state_dir / "runc" / _name(state_dir)).exists():
        return
    try:
        subprocess.run(
            [runc, "--root", str(state_dir / "runc"), "delete", "--force", _name(state_dir)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DELETE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
