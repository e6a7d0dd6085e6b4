"""System calls for a container's root: namespaces, mounts, pivot_root. Linux only.

By ctypes, since Python has `os.unshare` only since 3.12 and no mount(2). Edge module without state.
All functions act on the calling process.
"""

import contextlib
import ctypes
import errno
import os
import signal
import struct
import threading
from pathlib import Path
from typing import TypeAlias

from bootseer.linux.mount_table import parse_lines

PathLike: TypeAlias = str | bytes | os.PathLike[str]

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

# mount_setattr(2), since Linux 5.12, has one number on every architecture. Flags are from fcntl.h.
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1

_PR_SET_PDEATHSIG = 1
_PTRACE_TRACEME = 0
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises: OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount_namespace(process: int | str = "self") -> str:
    """Return the name of a process's mount namespace; empty if it is not visible."""
    try:
        return os.readlink(f"/proc/{process}/ns/mnt")
    except OSError:
        return ""


def has_processes(namespace: str) -> bool:
    """Return whether a mount namespace has a process that this user may inspect."""
    names = filter(str.isdigit, os.listdir("/proc"))
    return any(mount_namespace(name) == namespace for name in names)


def is_source_mounted(source: str) -> bool:
    """Return whether any process that this user may inspect has a mount with this source."""
    known = {""}
    for name in filter(str.isdigit, os.listdir("/proc")):
        namespace = mount_namespace(name)
        if namespace not in known:
            known.add(namespace)
            with contextlib.suppress(OSError):
                if os.fsencode(f" {source} ") in Path(f"/proc/{name}/mountinfo").read_bytes():
                    return True
    return False


def detach_copies(device_minor: int, timeout_s: float) -> None:
    """Detach a file system's mounts in all other mount namespaces, as far as this user may.

    A process that makes a namespace gets a copy of every mount, which keeps the file system alive
    although no file of it is open. Never raises. Ends after `timeout_s` if a path on the way to a
    mount hangs.
    """
    # A thread of its own, since setns(2) changes the namespace of the calling thread.
    work = threading.Thread(
        target=_detach_copies, args=(device_minor,), name="detach-copies", daemon=True
    )
    work.start()
    work.join(timeout_s)


def _detach_copies(device_minor: int) -> None:
    # Found before the first setns(2): another namespace has another /proc, or none.
    found: list[tuple[int, list[bytes]]] = []
    known = {"", mount_namespace()}
    for name in filter(str.isdigit, os.listdir("/proc")):
        namespace = mount_namespace(name)
        with contextlib.suppress(OSError):
            # In a chroot, paths are not those of the namespace.
            if namespace in known or os.readlink(f"/proc/{name}/root") != "/":
                continue
            known.add(namespace)
            lines = parse_lines(Path(f"/proc/{name}/mountinfo").read_bytes())
            # The last line of a path is that of the topmost mount.
            devices = {line.path: (line.major, line.minor) for line in lines}
            paths = [path for path, device in devices.items() if device == (0, device_minor)]
            if paths:
                flags = os.O_RDONLY | os.O_CLOEXEC
                found.append((os.open(f"/proc/{name}/ns/mnt", flags), paths))
    # setns(2) refuses a thread that shares its root with others.
    _libc.unshare(CLONE_FS)
    for fd, paths in found:
        if _libc.setns(fd, CLONE_NEWNS) == 0:
            for path in paths:
                _libc.umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW)
        os.close(fd)


def map_user(uid: int, gid: int) -> None:
    """Make this process root in its new user namespace, and user `uid`, group `gid` outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def mount(
    source: PathLike, target: PathLike, kind: str = "", flags: int = 0, options: str = ""
) -> None:
    """Mount a file system.

    Raises: OSError naming the target.
    """
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode("utf-8", "surrogateescape") or None,
    )
    _check(result, os.fsdecode(target))


def bind_read_only(source: PathLike, target: PathLike) -> None:
    """Bind `source`, with the mounts below it, to `target`, read-only.

    Before Linux 5.12 the mounts below `source` are left out. Raises: OSError naming the target.
    """
    mount(source, target, flags=MS_BIND | MS_REC)
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    if result == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        _check(result, os.fsdecode(target))
    unmount(target)
    mount(source, target, flags=MS_BIND)
    # A bind mount takes flags only by a remount, which must repeat the flags of the source.
    kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def unmount(target: PathLike) -> None:
    """Detach a mount. Raises: OSError."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), os.fsdecode(target))


def make_private() -> None:
    """Make all mounts private: new mounts do not spread between this namespace and others."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def change_root(root: PathLike) -> None:
    """Make the mount `root` the root directory, and detach the old root. Raises: OSError."""
    os.chdir(root)
    if _libc.pivot_root(b".", b".") == 0:
        # pivot_root(2), NOTES: the old root now lies on top of the new one at ".".
        unmount(".")
    else:
        # pivot_root(2) refuses if the old root is an initramfs.
        os.chroot(".")
    os.chdir("/")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, process `parent`, ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() not in (parent, 0):
        # The parent ended before the call. (0: the parent is outside this PID namespace.)
        os.kill(os.getpid(), signal.SIGKILL)


def trace_me() -> None:
    """Allow the parent to trace this process. Raises: OSError if this machine allows no tracing."""
    # Arguments after the request: pid, address, data; all ignored here (ptrace(2)).
    result = _libc.ptrace(ctypes.c_long(_PTRACE_TRACEME), ctypes.c_long(0), None, None)
    _check(result, "ptrace")
