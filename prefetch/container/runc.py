"""Containers run by runc: their OCI bundle and configuration, and becoming `runc run`.

The isolation is that of containerd's default configuration, except that network and host name are
the host's. The root is the one that `container.Container` has built; runc binds it recursively, so
that mounts below it, such as those of set-ups, are kept.

For the main thread only; forks.
"""

import json
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from bootseer.base.documents import from_line, to_line
from bootseer.base.json_errors import ErrorDocument, decode_error, encode_error
from bootseer.errors import UnsupportedError, from_oserror
from bootseer.linux import namespaces
from bootseer.linux.processes import kill_child
from bootseer.linux.root_paths import resolve_in_root
from bootseer.prefetch.container.process import ProcessSpec, become
from bootseer.prefetch.container.root import Bind
from bootseer.served.ending import runc_folder, runc_name

_REPORT_BYTES_MAX = 1 << 16
_RUNC_MOUNTS = ("/proc", "/sys", "/dev")
"""Folders on which runc mounts new file systems for the container."""
FRESH_SYSFS, BOUND_SYSFS = "fresh", "bound"
"""A new sysfs; or a bind of the host's without the mounts in it, if the kernel refuses a new one
because the network belongs to another user namespace."""


class DeviceNode(Struct, frozen=True):
    """Device that the container may use."""

    kind: str
    """"c" for character devices, "b" for block devices."""
    major: int
    minor: int


def check_runc() -> str:
    """Return the path of runc. Raises: UnsupportedError if it cannot be used."""
    runc = shutil.which("runc")
    if runc is None:
        raise UnsupportedError("--runtime runc: runc is not installed; install it, or leave it out")
    if os.geteuid():
        raise UnsupportedError("--runtime runc needs root; leave it out to run without isolation")
    return runc


def exec_runc(spec: ProcessSpec, root: Path, state_dir: Path, binds: Sequence[Bind]) -> NoReturn:
    """Replace this process by `runc run` of a process in `root`.

    runc forwards signals, and exits with the exit code of the process. `root` has all mounts,
    `binds` among them, in this process's mount namespace. `state_dir` is the folder of the server
    that ends the container if runc is killed.
    Raises: SetupFailedError, with exit code 126 or 127, if the program cannot be run;
    BootseerError.
    """
    runc = check_runc()
    _try_in_child(lambda: _become_program(spec, root))
    folder = runc_folder(state_dir)
    try:
        bundle = folder / "bundle"
        bundle.mkdir(mode=0o700, parents=True)
        _unmount_host_mounts(root)
        config = runtime_config(
            spec,
            str(root),
            _binds_below(root, binds, bundle),
            _devices(binds),
            terminal=sys.stdin.isatty() and sys.stdout.isatty(),
            sysfs=_sysfs(bundle),
        )
        (bundle / "config.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = [runc, "--root", str(folder / "state"), "--log", os.devnull, "run"]
        os.execv(runc, [*arguments, "--bundle", str(bundle), runc_name(folder)])
    except OSError as error:
        raise from_oserror(error, f"run {runc}") from error


def _unmount_host_mounts(root: Path) -> None:
    """Unmount the host's file systems where runc mounts new ones. Raises: OSError.

    The new mounts would not cover all of them, such as control groups below /sys.
    """
    for path in _RUNC_MOUNTS:
        namespaces.unmount(resolve_in_root(root, path))


def _binds_below(root: Path, binds: Iterable[Bind], bundle: Path) -> list[Bind]:
    """Return the binds below the folders of `_RUNC_MOUNTS`, which runc must mount again.

    With "ro", runc leaves mounts below the source of a bind writable. So a read-only bind gets a
    read-only view of its source, in `bundle`. Raises: OSError.
    """
    own = [resolve_in_root(root, path) for path in _RUNC_MOUNTS]
    found = []
    for number, bind in enumerate(binds):
        target = resolve_in_root(root, bind.target)
        if not any(target.is_relative_to(path) for path in own):
            continue
        source = bind.source
        if bind.read_only:
            source = bundle / f"bind-{number}"
            if bind.source.is_dir():
                source.mkdir()
            else:
                source.touch()
            namespaces.bind_read_only(bind.source, source)
        found.append(Bind(source, bind.target, bind.read_only))
    return found


def _devices(binds: Iterable[Bind]) -> list[DeviceNode]:
    """Return the devices among the binds, which the container may use. Raises: OSError."""
    found = []
    for bind in binds:
        status = bind.source.stat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
            found.append(DeviceNode(kind, os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def _sysfs(bundle: Path) -> str:
    """Return FRESH_SYSFS if the kernel can mount a new sysfs here, else BOUND_SYSFS.

    The kernel refuses if the network belongs to another user namespace. Raises: OSError.
    """
    probe = bundle / "sysfs"
    probe.mkdir()
    try:
        namespaces.mount("sysfs", probe, "sysfs", namespaces.MS_RDONLY)
    except PermissionError:
        return BOUND_SYSFS
    namespaces.unmount(probe)
    return FRESH_SYSFS


# ---- check that the program can be started ------------------------------------------------------

# runc exits with 1 if it cannot start the program, which could be the program's own exit code.


def _become_program(spec: ProcessSpec, root: Path) -> NoReturn:
    """Replace this process by the program, as runc would. Raises: as `become`."""
    try:
        os.chroot(root)
        os.chdir("/")
    except OSError as error:
        raise from_oserror(error, f"look for {spec.arguments[0]} in the container") from error
    become(spec, rootless=False)


def _try_in_child(work: Callable[[], object]) -> None:
    """Call `work`, which executes a program, in a child that is killed before it runs.

    This finds out whether the kernel can run the program, without running it. Raises: the error of
    `work`.
    """
    parent = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(read_fd)
        _run_traced(work, parent, write_fd)
    os.close(write_fd)
    _, status = os.waitpid(pid, 0)
    if os.WIFSTOPPED(status):
        kill_child(pid)
    with os.fdopen(read_fd, "rb") as pipe:
        report = pipe.read(_REPORT_BYTES_MAX)
    if report:
        raise decode_error(from_line(report, ErrorDocument))


def _run_traced(work: Callable[[], object], parent: int, report_fd: int) -> NoReturn:
    try:
        namespaces.die_with_parent(parent)
        # A traced process stops once it has become the program (execve(2)).
        namespaces.trace_me()
        work()
    except BaseException as error:
        os.write(report_fd, to_line(encode_error(error, "the run")).encode("ascii"))
    finally:
        os._exit(1)


# ---- the configuration: config.json of the OCI runtime specification 1.0; pure ------------------

# The defaults of containerd and docker. Device nodes made with CAP_MKNOD cannot be opened, because
# of the device cgroup.
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
    # With cgroups v1, runc leaves the folder of the hierarchies writable.
    "/sys/fs/cgroup",
)


def runtime_config(
    spec: ProcessSpec,
    root: str,
    binds: Sequence[Bind],
    devices: Sequence[DeviceNode],
    *,
    terminal: bool,
    sysfs: str = FRESH_SYSFS,
) -> dict[str, Any]:
    """Return config.json of a container that shares only the network with the host. Pure.

    `binds` are mounted after all other file systems. Only `devices` may be used. `sysfs`:
    FRESH_SYSFS or BOUND_SYSFS.
    """
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
            _mount("/dev/pts", "devpts", "devpts", *_PTS_OPTIONS),
            _mount("/dev/shm", "tmpfs", "shm", *_NO_PROGRAMS, "mode=1777"),
            _mount("/dev/mqueue", "mqueue", "mqueue", *_NO_PROGRAMS),
            _sys_mount(sysfs),
            _mount("/sys/fs/cgroup", "cgroup", "cgroup", *_NO_PROGRAMS, "relatime", "ro"),
            *(_bind_mount(bind) for bind in binds),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    *map(_allowed_device, devices),
                ]
            },
            "seccomp": _seccomp_profile(),
        },
    }


_NO_PROGRAMS = ("nosuid", "noexec", "nodev")
_PTS_OPTIONS = ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")


def _sys_mount(sysfs: str) -> Mapping[str, Any]:
    if sysfs == FRESH_SYSFS:
        return _mount("/sys", "sysfs", "sysfs", *_NO_PROGRAMS, "ro")
    # "rbind" would show mounts below /sys, such as cgroups, and leave them writable.
    return _mount("/sys", "bind", "/sys", "bind", *_NO_PROGRAMS, "ro")


def _bind_mount(bind: Bind) -> Mapping[str, Any]:
    access = "ro" if bind.read_only else "rw"
    return _mount(bind.target, "bind", str(bind.source), "rbind", "rprivate", access)


def _allowed_device(device: DeviceNode) -> Mapping[str, Any]:
    return {
        "allow": True,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "access": "rw",
    }


def _mount(target: str, kind: str, source: str, *options: str) -> Mapping[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


# ---- system calls -------------------------------------------------------------------------------

# The system calls that containerd's default profile (`contrib/seccomp/seccomp_default.go`) allows a
# container with these capabilities: no mounts, namespaces, keyrings, kernel modules or bpf. Pure.

# ENOSYS on all architectures that libseccomp knows.
_NO_SUCH_CALL = 38
_AF_ALG, _AF_VSOCK = 38, 40
# CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWCGROUP of clone(2).
_NEW_NAMESPACES = 0x7E020000
# Allowed arguments of personality(2): Linux, 32 bits on 64, uname26; the last one only queries.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

_ARCHITECTURES = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
    "riscv64": ("SCMP_ARCH_RISCV64",),
    "loongarch64": ("SCMP_ARCH_LOONGARCH64",),
}
"""libseccomp's names of architectures, by `platform.machine()`. For other machines, libseccomp
takes the native architecture only."""

_OF_MACHINE = {
    "x86_64": ("arch_prctl", "modify_ldt"),
    "aarch64": (
        *("arm_fadvise64_64", "arm_sync_file_range", "sync_file_range2"),
        *("breakpoint", "cacheflush", "set_tls"),
    ),
    "ppc64le": ("sync_file_range2", "swapcontext"),
    "riscv64": ("riscv_flush_icache", "riscv_hwprobe"),
}

_ALLOWED = """
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32
    chroot clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range
    creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2
    epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2
    fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32
    fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
    fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64
    futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd
    getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32
    getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresgid32
    getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday
    getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup
    io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listmount listxattr
    listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules
    lsm_set_self_attr lstat lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret
    mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr
    mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64
    mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap
    name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl
    pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv process_vm_writev pselect6
    pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recv
    recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename
    renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
    sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select
    semctl semget semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg
    sendto set_robust_list set_thread_area set_tid_address setfsgid setfsgid32 setfsuid setfsuid32
    setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid setregid32
    setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setsockopt
    setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd
    signalfd4 sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs statfs64
    statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time
    timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime
    timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
    timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat
    uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write
    writev
"""


def _seccomp_profile() -> dict[str, Any]:
    """Return `linux.seccomp` of config.json, for this machine.

    libseccomp ignores names that it does not know. A call that is not listed fails with EPERM.
    """
    machine = platform.machine()
    names = [*_ALLOWED.split(), *_OF_MACHINE.get(machine, ())]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": list(_ARCHITECTURES.get(machine, ())),
        "syscalls": [
            _allowed(names),
            # One rule for each condition: runc combines several conditions on one argument by "or",
            # which would allow both families.
            _allowed(["socket"], _first_argument("SCMP_CMP_LT", _AF_ALG)),
            _allowed(["socket"], _first_argument("SCMP_CMP_EQ", _AF_ALG + 1)),
            _allowed(["socket"], _first_argument("SCMP_CMP_GT", _AF_VSOCK)),
            *(
                _allowed(["personality"], _first_argument("SCMP_CMP_EQ", value))
                for value in _PERSONALITIES
            ),
            _allowed(["clone"], _first_argument("SCMP_CMP_MASKED_EQ", _NEW_NAMESPACES)),
            # A filter cannot read the flags of clone3 in memory. On ENOSYS, C libraries use clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _NO_SUCH_CALL},
        ],
    }


def _allowed(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _first_argument(comparison: str, value: int) -> dict[str, Any]:
    # For SCMP_CMP_MASKED_EQ, `value` is the mask, and `valueTwo` the expected result.
    return {"index": 0, "value": value, "valueTwo": 0, "op": comparison}
