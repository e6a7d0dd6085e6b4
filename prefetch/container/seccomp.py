"""Which system calls a container that runc isolates may make.

The same calls that containerd's default profile (its `contrib/seccomp/seccomp_default.go`) allows a
container with the capabilities of `runtime_config`: no mounts, no namespaces, no keyrings, no
kernel modules, no bpf. Pure.
"""

import platform
from typing import Any

# errno.ENOSYS, of every Linux that libseccomp knows.
_NO_SUCH_CALL = 38
_AF_ALG, _AF_VSOCK = 38, 40
# CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWCGROUP of clone(2).
_NEW_NAMESPACES = 0x7E020000
# What personality(2) may be set to: Linux, 32 bits on 64, uname26; the last one only asks.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

_ARCHITECTURES = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
    "riscv64": ("SCMP_ARCH_RISCV64",),
    "loongarch64": ("SCMP_ARCH_LOONGARCH64",),
}
"""libseccomp's names of architectures by `platform.machine()`; elsewhere libseccomp takes the
machine's own alone."""

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


def seccomp_profile(machine: str = "") -> dict[str, Any]:
    """`linux.seccomp` of a runtime configuration, for `machine` (default: this one's name).

    libseccomp leaves out names that it does not know. A call that is not named fails with EPERM.
    """
    machine = machine or platform.machine()
    names = [*_ALLOWED.split(), *_OF_MACHINE.get(machine, ())]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": list(_ARCHITECTURES.get(machine, ())),
        "syscalls": [
            _allowed(names),
            # One condition each: runc makes several of one argument alternatives, which would allow
            # both families.
            _allowed(["socket"], _argument(0, "SCMP_CMP_LT", _AF_ALG)),
            _allowed(["socket"], _argument(0, "SCMP_CMP_EQ", _AF_ALG + 1)),
            _allowed(["socket"], _argument(0, "SCMP_CMP_GT", _AF_VSOCK)),
            *(
                _allowed(["personality"], _argument(0, "SCMP_CMP_EQ", value))
                for value in _PERSONALITIES
            ),
            _allowed(["clone"], _argument(0, "SCMP_CMP_MASKED_EQ", _NEW_NAMESPACES)),
            # Its flags lie in memory, where no filter sees them. On ENOSYS C libraries use clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _NO_SUCH_CALL},
        ],
    }


def _allowed(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _argument(index: int, comparison: str, value: int) -> dict[str, Any]:
    # For SCMP_CMP_MASKED_EQ `value` is the mask, and what must be left is `valueTwo`.
    return {"index": index, "value": value, "valueTwo": 0, "op": comparison}
