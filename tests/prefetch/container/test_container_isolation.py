"""Isolation of `run --runtime runc` from a hostile program that is root in the container."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import UnsupportedError, exit_code_of
from bootseer.linux import namespaces
from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import Completed, bootseer, index, settings_at
from testbed.mounts.sweeping import sweep
from testbed.needs import require

pytestmark = pytest.mark.needs("mount", "fuse")

HOST_FILES = ("/etc/hosts", "/etc/resolv.conf")

# Each attempt returns the name of its error, or "done". Files are opened for writing, but no byte
# is written: a container that is not isolated must not break the machine.
ATTEMPTS = """
import ctypes, errno, json, os, platform, socket, stat, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
found = {}

def attempt(name, work):
    try:
        work()
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error.errno))
    else:
        found[name] = "done"

def call(name, *arguments):
    def work():
        if getattr(libc, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno(), name)
    attempt(name, work)

def system_call(name, number, *arguments):
    def work():
        if libc.syscall(ctypes.c_long(number), *arguments) == -1:
            raise OSError(ctypes.get_errno(), name)
    attempt(name, work)

def write(path):
    attempt("write " + path, lambda: os.close(os.open(path, os.O_WRONLY)))

for path in ("/etc/hosts", "/etc/resolv.conf"):
    write(path)
    attempt("truncate " + path, lambda: os.truncate(path, os.stat(path).st_size))
    attempt("chmod " + path, lambda: os.chmod(path, os.stat(path).st_mode & 0o7777))
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
             "/proc/sys/vm/drop_caches", "/proc/irq/default_smp_affinity"):
    if os.path.exists(path):
        write(path)
for path in ("/proc/kcore", "/proc/keys"):
    attempt("read " + path, lambda: open(path, "rb").read(1) or (_ for _ in ()).throw(
        OSError(errno.ENODATA, path)))

# The host's control groups and kernel objects.
for top, folders, files in os.walk("/sys"):
    if top.count("/") > 5 or top.startswith(("/sys/devices", "/sys/bus", "/sys/module")):
        folders.clear()
    for name in files:
        path = os.path.join(top, name)
        if os.stat(path, follow_symlinks=False).st_mode & 0o222:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW))
                found["write " + path] = "done"
            except OSError:
                pass
    if top.startswith("/sys/fs/cgroup"):
        attempt("mkdir " + top, lambda: (os.mkdir(top + "/hostile"), os.rmdir(top + "/hostile")))
for root, _, _ in os.walk("/sys/fs/cgroup"):
    victim = os.path.join(root, sys.argv[1], "cgroup.kill")
    if os.path.exists(victim):
        attempt("kill a cgroup of the host", lambda: open(victim, "w").write("1"))

# Mounts and namespaces.
os.makedirs("/point", exist_ok=True)
call("mount", b"none", b"/point", b"tmpfs", ctypes.c_ulong(0), None)
call("mount", b"none", b"/etc/hosts", None, ctypes.c_ulong(32 | 4096), None)
call("mount", b"cgroup2", b"/point", b"cgroup2", ctypes.c_ulong(0), None)
call("umount2", b"/proc/sys", 2)
call("unshare", 0x10000000)
call("unshare", 0x00020000)
call("unshare", 0x02000000)
call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)
call("sethostname", b"hostile", 7)
call("swapoff", b"/none")
call("acct", b"/acct")
call("pivot_root", b"/point", b"/point")
call("klogctl", 3, ctypes.create_string_buffer(64), 64)
call("reboot", 0)  # CAD off: of a PID namespace it is refused as invalid, with the right to it

# Kernel interfaces; the numbers of asm-generic and x86-64 differ below 424.
x86 = platform.machine() == "x86_64"
system_call("add_key", 248 if x86 else 217, b"user", b"hostile", b"x", ctypes.c_size_t(1), -2)
system_call("keyctl", 250 if x86 else 219, 0, -3, 0)
system_call("bpf", 321 if x86 else 280, 0, None, 0)
system_call("perf_event_open", 298 if x86 else 241, None, 0, -1, -1, 0)
system_call("init_module", 175 if x86 else 105, b"", 0, b"")
system_call("kexec_load", 246 if x86 else 104, 0, 0, None, 0)
system_call("userfaultfd", 323 if x86 else 282, 0)
system_call("io_uring_setup", 425, 1, ctypes.create_string_buffer(120))
system_call("open_tree", 428, -100, b"/", 1)
system_call("fsopen", 430, b"tmpfs", 0)
system_call("mount_setattr", 442, -100, b"/etc/hosts", 0, struct.pack("=QQQQ", 0, 1, 0, 0), 32)
new_user = struct.pack("=QQQQQQQQ", 0x10000000, *[0] * 7)
system_call("clone3", 435, ctypes.create_string_buffer(new_user), 64)
# A file handle of the host's root directory, as in the escape called Shocker.
handle = struct.pack("=IiQ", 8, 1, 2)
system_call("open_by_handle_at", 304 if x86 else 265, os.open("/etc/hosts", os.O_RDONLY), handle, 0)
for family in (socket.AF_ALG, socket.AF_VSOCK):
    attempt(family.name, lambda: socket.socket(family, socket.SOCK_SEQPACKET if family == 38
                                               else socket.SOCK_STREAM).close())

# Devices: a node can be made, but not opened.
for kind, major, minor, name in json.loads(sys.argv[2]):
    mode = stat.S_IFBLK if kind == "b" else stat.S_IFCHR
    os.mknod("/point/" + name, mode | 0o666, os.makedev(major, minor))
    for flags in (os.O_RDONLY, os.O_WRONLY):
        attempt(f"open {name} {flags}", lambda: os.close(os.open("/point/" + name, flags)))

# Processes of the host.
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 2:
    found["see processes"] = "done"
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def attach():
    if libc.ptrace(16, int(sys.argv[3]), None, None) == -1:
        raise OSError(ctypes.get_errno(), "ptrace")
attempt("ptrace", attach)
attempt("kill", lambda: os.kill(int(sys.argv[3]), 0))

status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
# The last of several mounts on a path is visible.
mounts = {line.split()[4]: line.split()[5].split(",") for line in open("/proc/self/mountinfo")}
print(json.dumps({
    "found": found,
    "status": {name: status[name].strip() for name in ("NoNewPrivs", "Seccomp", "CapBnd")},
    "cgroups": [line.strip().split(":", 2)[2] for line in open("/proc/self/cgroup")],
    "writable": [path for path, options in mounts.items()
                 if path.startswith("/sys") and "ro" not in options],
}))
"""


class ContainerNode:
    """Node whose store has a small Python image."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def python(
        self, runtime: str, code: str, *arguments: object, options: tuple[object, ...] = ()
    ) -> Completed:
        words = ("run", "--image", "py:1", "--runtime", runtime, *options)
        return bootseer(self.settings, *words, "--", "python3", "-c", code, *arguments)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, small_root: Path) -> Iterator[ContainerNode]:
    require("root", "fuse")
    settings = settings_at(tmp_path_factory.mktemp("isolation"))
    index(settings, small_root, "py:1")
    yield ContainerNode(settings)
    sweep(settings.run_dir.parent, settings)


@pytest.fixture
def runc() -> None:
    require(programs=["runc"])


@pytest.fixture
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """Process of the host."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def cgroup(victim: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Name of the victim's control group; "none" without cgroups v2."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            group = Path(line.split()[4], f"bootseer-test-{os.getpid()}")
            group.mkdir()
            (group / "cgroup.procs").write_text(str(victim.pid))
            yield group.name
            victim.kill()
            victim.wait()
            for path in (*group.glob("*/"), group):
                path.rmdir()
            return
    yield "none"


def devices() -> list[tuple[str, int, int, str]]:
    """Return device nodes that control the machine: its disk, memory, kernel log, and FUSE."""
    root = os.stat("/").st_dev
    return [
        ("b", os.major(root), os.minor(root), "disk"),
        ("c", 1, 1, "mem"),
        ("c", 1, 11, "kmsg"),
        ("c", 10, 229, "fuse"),
    ]


@pytest.mark.usefixtures("runc")
def test_a_hostile_container_reaches_nothing_of_the_host(
    node: ContainerNode, victim: "subprocess.Popen[bytes]", cgroup: str
) -> None:
    before = {name: Path(name).read_bytes() for name in HOST_FILES if Path(name).exists()}
    done = node.python("runc", ATTEMPTS, cgroup, json.dumps(devices()), victim.pid)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    succeeded = {name for name, error in document["found"].items() if error == "done"}
    assert succeeded == set()
    assert document["found"]["clone3"] == "ENOSYS"
    for name in ("add_key", "bpf", "open_by_handle_at", "mount_setattr", "AF_VSOCK", "AF_ALG"):
        assert document["found"][name] == "EPERM", name
    assert document["status"] == {
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "CapBnd": "00000000a80425fb",
    }
    assert set(document["cgroups"]) == {"/"}
    assert document["writable"] == []
    assert victim.poll() is None
    assert {name: Path(name).read_bytes() for name in before} == before


@pytest.mark.usefixtures("runc")
def test_a_device_that_is_bound_can_be_used(node: ContainerNode) -> None:
    code = "import os; os.close(os.open('/dev/fuse', os.O_RDWR)); print('opened')"
    done = node.python("runc", code, options=("--bind", "/dev/fuse:/dev/fuse"))
    assert done.stdout == "opened\n", done.stderr
    assert "FileNotFoundError" in node.python("runc", code).stderr


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Path]:
    """Folder in which another file system is mounted."""
    inner = tmp_path / "data/inner"
    inner.mkdir(parents=True)
    namespaces.mount("tmpfs", inner, "tmpfs")
    (inner / "file").write_text("below")
    yield tmp_path / "data"
    namespaces.unmount(inner)


@pytest.mark.parametrize("runtime", ["chroot", "runc"])
def test_a_read_only_bind_is_so_with_all_that_is_mounted_below(
    node: ContainerNode, runtime: str, below: Path, request: pytest.FixtureRequest
) -> None:
    if runtime == "runc":
        request.getfixturevalue("runc")
    code = """
import errno
print(open("/data/inner/file").read())
for name in ("/data/new", "/data/inner/new", "/data/inner/file", "/etc/hosts"):
    try:
        open(name, "a").close()
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    done = node.python(runtime, code, options=("--bind", f"{below}:/data:ro"))
    assert done.stdout.split() == ["below", "EROFS", "EROFS", "EROFS", "EROFS"], done.stderr


def test_a_container_is_not_started_without_the_isolation_that_was_asked_for(
    node: ContainerNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = node.python("runc", "print(1)")
    assert (done.stdout, done.returncode) == ("", exit_code_of(UnsupportedError(""))), done.stderr
    assert "runc is not installed" in done.stderr
