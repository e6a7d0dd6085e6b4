"""What runc is told of a container: config.json of the OCI runtime specification 1.0.

Alone decides what separates a container from its host: as much as containerd's default
configuration, but for the network, which is the host's, and so the name is, too: it is what
/etc/hosts and DNS know. Pure (no I/O).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bootseer.prefetch.container.process_spec import ProcessSpec
from bootseer.prefetch.container.seccomp import seccomp_profile

# What containerd and docker give by default. CAP_MKNOD makes nodes that the device cgroup then
# does not let anybody open.
_CAPABILITIES = (
    *("CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL"),
    *("CAP_MKNOD", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID"),
    *("CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"),
)
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
_READ_ONLY = (
    *("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"),
    # Of cgroups v1, what holds the hierarchies: runc leaves it writable.
    "/sys/fs/cgroup",
)

FRESH_SYSFS, BOUND_SYSFS = "fresh", "bound"
"""A sysfs of the container's own; or a view of the host's, without what is mounted in that: for
where the kernel makes none, because the network belongs to another user namespace."""


class BoundPath(Struct, frozen=True):
    """A path of the host that shows in the container. Where it is read-only its source is so, too,
    with all that is mounted below it."""

    source: str
    target: str
    read_only: bool = False
    device: "Device | None" = None
    """What it is, if it is a device node: that the container may use."""


class Device(Struct, frozen=True):
    """A device node."""

    kind: str
    """"c" or "b"."""
    major: int
    minor: int


def runtime_config(
    spec: ProcessSpec,
    root: str,
    binds: Sequence[BoundPath],
    *,
    terminal: bool,
    sysfs: str = FRESH_SYSFS,
) -> dict[str, Any]:
    """The configuration of a container with the host's network; all else is separate. Pure."""
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
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": False},
        "mounts": [
            _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", *_TERMINALS),
            _mount("/dev/shm", "tmpfs", "shm", *_UNUSABLE, "mode=1777"),
            _mount("/dev/mqueue", "mqueue", "mqueue", *_UNUSABLE),
            _sys(sysfs),
            _mount("/sys/fs/cgroup", "cgroup", "cgroup", *_UNUSABLE, "relatime", "ro"),
            *(_bind(bind) for bind in binds),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    *(_usable(bind.device) for bind in binds if bind.device is not None),
                ]
            },
            "seccomp": seccomp_profile(),
        },
    }


_UNUSABLE = ("nosuid", "noexec", "nodev")
_TERMINALS = ("ptmxmode=0666", "mode=0620", "gid=5")


def _sys(sysfs: str) -> Mapping[str, Any]:
    if sysfs == FRESH_SYSFS:
        return _mount("/sys", "sysfs", "sysfs", *_UNUSABLE, "ro")
    # Not "rbind": what is mounted below, such as cgroups, would be there and writable.
    return _mount("/sys", "bind", "/sys", "bind", *_UNUSABLE, "ro")


def _bind(bind: BoundPath) -> Mapping[str, Any]:
    access = "ro" if bind.read_only else "rw"
    return _mount(bind.target, "bind", bind.source, "rbind", "rprivate", access)


def _usable(device: Device) -> Mapping[str, Any]:
    return {
        "allow": True,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "access": "rw",
    }


def _mount(target: str, kind: str, source: str, *options: str) -> Mapping[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}
