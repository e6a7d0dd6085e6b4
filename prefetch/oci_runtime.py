"""Running a container with runc: its configuration, and becoming it.

`runtime_config` is pure. The rest acts in the child that `run` forked.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bootseer.errors import SetupFailedError, UnsupportedError, from_oserror
from bootseer.prefetch import signals
from bootseer.prefetch.container_root import Bind
from bootseer.prefetch.process_spec import ProcessSpec
from bootseer.rooted import resolve_in_root

if TYPE_CHECKING:
    from bootseer.prefetch.container import Container

# What docker gives by default.
_CAPABILITIES = (
    *("CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL"),
    *("CAP_MKNOD", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID"),
    *("CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"),
)
_MASKED = (
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_DELETE_S = 20


def runtime_config(
    spec: ProcessSpec, root: Path, binds: Sequence[Bind], *, terminal: bool, host_name: str
) -> dict[str, Any]:
    """config.json of the OCI runtime specification 1.0: host network, all else separate. Pure."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": terminal,
            "user": {
                "uid": spec.user.uid,
                "gid": spec.user.gid,
                "additionalGids": list(spec.user.groups),
            },
            "args": list(spec.arguments),
            "env": [f"{name}={value}" for name, value in spec.environment.items()],
            "cwd": spec.working_dir,
            "capabilities": {
                kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")
            },
            "noNewPrivileges": False,
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": host_name,
        "mounts": [
            _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "gid=5"),
            _mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777"),
            _mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
            _mount("/sys", "bind", "/sys", "rbind", "nosuid", "noexec", "nodev", "ro"),
            *(
                _mount(
                    bind.target, "bind", str(bind.source), "rbind", "ro" if bind.read_only else "rw"
                )
                for bind in binds
            ),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }


def _mount(target: str, kind: str, source: str, *options: str) -> Mapping[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def exec_runc(container: "Container", spec: ProcessSpec) -> NoReturn:
    """Build the root in a mount namespace and become `runc run` over it."""
    container.unshare()
    container.build(own_pids=False, furnished=False)
    if not container.binds:  # what those show is not in the root yet
        _check_program(container.root, spec)
    state_dir = container.image.state_dir
    hosts = [
        Bind(Path(name).resolve(), name)
        for name in ("/etc/resolv.conf", "/etc/hosts")
        if Path(name).exists()
    ]
    config = runtime_config(
        spec,
        container.root,
        [*hosts, *container.binds],
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        host_name=state_dir.name[:12],
    )
    runc = shutil.which("runc")
    if runc is None:
        raise UnsupportedError("runc is not installed; use --runtime chroot")
    try:
        bundle = state_dir / "bundle"
        bundle.mkdir(mode=0o700)
        (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")
        signals.restore()
        arguments = [runc, "--root", str(state_dir / "runc"), "run"]
        arguments += ["--bundle", str(bundle), _name(state_dir)]
        os.execv(runc, arguments)
    except OSError as error:
        raise from_oserror(error, f"run {runc}") from error


def _check_program(root: Path, spec: ProcessSpec) -> None:
    """runc exits with 1 for a program that is not there, which could be the program's own.

    Raises: SetupFailedError with 127 or 126, as shells have it.
    """
    name = spec.arguments[0]
    folders = [""] if "/" in name else spec.environment.get("PATH", "").split(":")
    found = [
        resolve_in_root(root, os.path.join(spec.working_dir, folder, name)) for folder in folders
    ]
    files = [path for path in found if path.is_file()]
    if not files:
        raise SetupFailedError(f"the image has no command {name!r}", 127)
    if not any(path.stat().st_mode & 0o111 for path in files):
        raise SetupFailedError(f"{name} in the image is not executable", 126)


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
