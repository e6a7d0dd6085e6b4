"""Commands in images: both runtimes, users, binds, signals, kills, and a job that execs."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from bootseer.served.service import ServiceState, live_mounts, services_dir
from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import (
    Completed,
    bootseer,
    drop_cache,
    index,
    settings_at,
    start_bootseer,
)
from testbed.mounts.sweeping import sweep
from testbed.needs import MissingError, require
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount", "fuse")

RUNTIMES = ("chroot", "runc")


@dataclass
class ContainerNode:
    """Node whose store has a small Python image."""

    settings: Settings
    root: Path

    def run(self, *arguments: object) -> Completed:
        return bootseer(self.settings, "run", "--image", "py:1", *arguments)

    def start(self, runtime: str, code: str, *options: object) -> "subprocess.Popen[str]":
        command = ("--", "python3", "-c", code)
        words = ("run", "--image", "py:1", "--runtime", runtime, *options, *command)
        return start_bootseer(self.settings, *words)

    def python(self, runtime: str, code: str, *options: object) -> Completed:
        return self.run("--runtime", runtime, *options, "--", "python3", "-c", code)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, small_root: Path) -> Iterator[ContainerNode]:
    require("root", "fuse")
    base = tmp_path_factory.mktemp("containers")
    settings = settings_at(base)
    root = Path(shutil.copytree(small_root, base / "root", symlinks=True))
    with (root / "etc/passwd").open("a") as file:
        file.write("worker:x:1000:1001::/home/worker:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nextra:x:1002:worker\n")
    (root / "etc/hosts").symlink_to("../../../../elsewhere/hosts")
    index(settings, root, "py:1")
    yield ContainerNode(settings, root)
    sweep(settings.run_dir.parent, settings)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "runc" and shutil.which("runc") is None:
        raise MissingError("runc is not installed")
    found: str = request.param
    return found


def test_files_are_the_images_and_writes_are_thrown_away(node: ContainerNode, runtime: str) -> None:
    code = """
import hashlib, json, os, sys
print(json.dumps([hashlib.sha256(open(json.__file__, "rb").read()).hexdigest(), json.__file__,
                  os.listdir("/"), os.stat("/").st_mode & 0o777]))
open("/written", "w").write("x")
os.unlink("/etc/passwd")
os.mkdir("/usr/new")
"""
    for _ in range(2):
        done = node.python(runtime, code)
        assert done.returncode == 0, done.stderr
        digest, path, names, mode = json.loads(done.stdout)
        assert path.startswith(str(Path(json.__file__).parent))
        assert "written" not in names
        assert mode == node.root.stat().st_mode & 0o777
        assert len(digest) == 64
    assert (node.root / "etc/passwd").exists()
    # Its server ends without a signal.
    wait_for(lambda: not [*live_mounts(node.settings.run_dir)])


def test_exit_codes(node: ContainerNode, runtime: str) -> None:
    assert node.python(runtime, "raise SystemExit(7)").returncode == 7
    killed = node.python(runtime, "import os; os.abort()")
    # The first process of a PID namespace gets no SIGABRT: abort() then faults, as under docker.
    expected = 128 + signal.SIGSEGV if runtime == "runc" else -signal.SIGABRT
    assert killed.returncode == expected


def test_a_command_that_cannot_be_started(
    node: ContainerNode, runtime: str, tmp_path: Path
) -> None:
    missing = node.run("--runtime", runtime, "--", "no-such-program")
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
    refused = node.run("--runtime", runtime, "--", "/etc/passwd")
    assert refused.returncode == 126
    empty = node.run("--runtime", runtime)
    assert empty.returncode == 2
    assert "--" in empty.stderr
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "other-machine").write_bytes(b"\x7fELF" + bytes(100))
    (tmp_path / "other-machine").chmod(0o755)
    (tmp_path / "for-root").write_text("#!/bin/sh\n")
    (tmp_path / "for-root").chmod(0o700)
    for program, options, code in (
        ("no-such-program", (), 127),
        ("script", (), 126),
        ("other-machine", (), 126),
        ("for-root", ("--user", "worker"), 126),
        ("", (), 126),
    ):
        bind = ("--bind", f"{tmp_path}:/programs", *options)
        done = node.run("--runtime", runtime, *bind, "--", f"/programs/{program}")
        assert done.returncode == code, (program, done.stderr)
        # One sentence of Bootseer, and nothing of runc's log.
        (line,) = done.stderr.splitlines()
        assert f"/programs/{program}" in line
        assert "level=" not in line


def test_environment_user_and_folder(
    node: ContainerNode, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", "b")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    code = "import json, os; print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), "
    code += "dict(os.environ), os.getcwd()]))"
    done = node.python(runtime, code, "--user", "worker")
    assert done.returncode == 0, done.stderr
    uid, gid, groups, environment, folder = json.loads(done.stdout)
    assert (uid, gid, folder) == (1000, 1001, "/")
    assert 1002 in groups
    assert environment["A"] == "b"
    assert environment["HOME"] == "/home/worker"
    assert environment["PATH"].startswith("/usr/local/sbin")
    assert environment["BOOTSEER_READY_SOCKETS"].startswith("bootseer-ready-")
    assert environment.get("PYTHONPATH", "").startswith("/run/bootseer")
    assert "VIRTUAL_ENV" not in environment
    assert node.python(runtime, "", "--user", "nobody-here").returncode == 2


def test_binds_show_paths_of_the_host(node: ContainerNode, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_text("from the host")
    (tmp_path / "out").mkdir()
    code = """
import errno
print(open("/data/in/file").read())
try:
    open("/data/in/new", "w")
except OSError as error:
    print(errno.errorcode[error.errno])
open("/out/new", "w").write("from the container")
"""
    binds = ("--bind", f"{tmp_path}/in:/data/in:ro", "--bind", f"{tmp_path}/out:/out")
    done = node.python(runtime, code, *binds)
    assert done.stdout == "from the host\nEROFS\n", done.stderr
    assert (tmp_path / "out/new").read_text() == "from the container"
    assert node.python(runtime, "", "--bind", "/no/such:/x").returncode == 10
    assert node.python(runtime, "", "--bind", "relative").returncode == 2


def test_what_programs_expect_is_there(node: ContainerNode, runtime: str) -> None:
    code = """
import os, socket
assert open("/proc/self/stat").read()
assert os.listdir("/sys/class")
open("/dev/null", "w").write("x")
assert len(os.urandom(4)) == 4
assert os.stat("/tmp").st_mode & 0o7777 == 0o1777
# Regression: neither /etc/hosts nor DNS had the name by which ranks find their address.
assert socket.gethostname() == NAME
# The image's link leads out of its root: the host's file must be unchanged.
assert open("/etc/hosts").read() is not None
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
    done = node.python(runtime, code.replace("NAME", repr(socket.gethostname())))
    assert done.returncode == 0, done.stderr
    if runtime == "runc":
        assert int(done.stdout) == 1
    assert not Path("/elsewhere").exists()


def test_signals_are_passed_on(node: ContainerNode, runtime: str) -> None:
    code = """
import os, signal, sys, time
def stop(number, frame):
    os.write(1, b"got %d\\n" % number)
    sys.exit(9)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"up\\n")
while True:
    # A signal just before a sleep is handled after it.
    time.sleep(0.02)
"""
    with node.start(runtime, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (out, process.returncode) == (f"got {int(signal.SIGTERM)}\n", 9), err


def the_mount(node: ContainerNode) -> tuple[Path, ServiceState]:
    """Return the only mount and its state once the servers of earlier containers have ended."""
    wait_for(lambda: len([*live_mounts(node.settings.run_dir)]) == 1, "the end of earlier servers")
    return next(iter(live_mounts(node.settings.run_dir)))


def test_kill_9_of_the_runner_leaves_nothing(node: ContainerNode, runtime: str) -> None:
    code = "import os, time; print('up', flush=True); time.sleep(600)"
    with node.start(runtime, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        state_dir, _ = the_mount(node)
        process.kill()
    wait_for(lambda: not state_dir.exists())
    wait_for(lambda: not any((node.settings.cache_dir / "containers").iterdir()))
    assert node.python(runtime, "print(1)").stdout == "1\n"


def test_second_run_replays(node: ContainerNode) -> None:
    node = dataclasses.replace(node, settings=structs.replace(node.settings, workload="replayed"))
    drop_cache(node.settings)
    code = "import json, decimal, email.message"
    assert node.python("chroot", code).returncode == 0
    waited = bootseer(node.settings, "status", "--wait", 60, "--json")
    assert waited.returncode == 0, waited.stderr
    drop_cache(node.settings)
    code += "; print('up', flush=True); import time; time.sleep(600)"
    with node.start("chroot", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        the_mount(node)
        rows = json.loads(bootseer(node.settings, "status", "--json").stdout)["served"]
        (status,) = (row["figures"] for row in rows if row["figures"])
        process.terminate()
        process.wait(60)
    assert status["prefetch"]["recall"] > 0.9
    assert status["moved"]["fetched_bytes"] < status["image_bytes"] / 4
    assert status["faults"]["fault_frame_count"] < 20


def test_exec_keeps_the_process_and_the_mounts_last_as_long(node: ContainerNode) -> None:
    code = """
import os, sys, time
print(os.getpid(), flush=True)
parent, child = os.getpid(), os.fork()
if child:
    print(child, flush=True)
    os._exit(5)
# The job's process is gone; a process that it left goes on reading.
while os.getppid() == parent:
    time.sleep(0.01)
import decimal
open("/seen/still-there", "w").close()
time.sleep(600)
"""
    bind = f"{node.settings.cache_dir}/containers:/seen"
    with node.start("chroot", code, "--bind", bind) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid}\n"
        left = int(process.stdout.readline())
        assert process.wait(60) == 5
        mark = node.settings.cache_dir / "containers/still-there"
        wait_for(mark.exists)
        mark.unlink()
        state_dir, state = the_mount(node)
        os.kill(left, signal.SIGKILL)
    wait_for(lambda: not state_dir.exists())
    assert not Path(state.scratch).exists()


def test_what_a_container_wrote_is_removed_however_deep_it_is(
    node: ContainerNode, runtime: str
) -> None:
    """Deeper than Python's recursion limit, and longer than any path."""
    code = """
import os
for _ in range(1500):
    os.mkdir("deep")
    os.chdir("deep")
"""
    done = node.python(runtime, code)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: list(services_dir(node.settings.run_dir).iterdir()) == [])
    wait_for(lambda: not any((node.settings.cache_dir / "containers").iterdir()))
    assert node.python(runtime, "print(1)").stdout == "1\n"
