"""The installer on each version of containerd here, with the folders of a node."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, UnsupportedError
from bootseer.kubernetes import containerd_config as installer
from bootseer.kubernetes.containerd_config import install, remove, without_block
from bootseer.kubernetes.containerd_process import ContainerdDaemon
from testbed.containers.containerd_node import programs
from testbed.needs import MissingError, require
from testbed.packages import Packages
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

pytestmark = pytest.mark.needs("mount")

ADDRESS = "/run/bootseer/snapshotter.sock"
PLATFORM = "linux/amd64"
# As a node of a platform team has it: the settings that a lost table would lose.
NODE = """version = 2

[plugins."io.containerd.grpc.v1.cri"]
  enable_selinux = false
  max_container_log_line_size = 4096 # ours
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "nvidia"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.runc.v2"
      pod_annotations = ["example.com/*"]
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
        BinaryName = "/usr/bin/nvidia-container-runtime"
        SystemdCgroup = true
[proxy_plugins.other]
type = "snapshot"
address = "/run/other.sock\""""
# Namespaces of its own stand for a node: the folders are where a node has them.
START = """
for name in etc:/etc/containerd lib:/var/lib/containerd run:/run/containerd opt:/opt/containerd; do
    mkdir -p ${name#*:} {base}/${name%%:*}
    mount --bind {base}/${name%%:*} ${name#*:}
done
while [ ! -e {base}/end ]; do {before}{program} >> {base}/log 2>&1; sleep 0.1; done
"""
# What k3s writes whenever it starts, by its documentation: a file of its own, or of a template.
K3S = """
folder=/etc/containerd/rancher
base='{base_text}'
if [ -e $folder/{template} ]; then
    tail -n +2 $folder/{template} | { echo "$base"; cat; } > $folder/config.toml
else
    echo "$base" > $folder/config.toml
fi
"""


class Machine:
    """Node with a containerd that is started again when it ends."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        self.config = base / "etc/config.toml"
        self.socket = base / "run/containerd.sock"
        self.config.parent.mkdir(parents=True)
        self.restarts = base / "restarts"
        self.restarts.touch()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, config: str | None, *, before: str = "", options: str = "") -> ContainerdDaemon:
        if config is not None:
            self.config.write_text(config)
        text = START.replace("{base}", str(self.base)).replace("{before}", before)
        text = text.replace("{program}", f"{self.folder / 'containerd'} {options}")
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", text],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"},
        )
        wait_for(self.answers, "containerd's start")
        return self.daemon()

    def daemon(self, restart: str = "kill {pid}") -> ContainerdDaemon:
        return ContainerdDaemon(self.socket, f"echo >> {self.restarts}; {restart}")

    def answers(self) -> bool:
        try:
            self.daemon().loaded()
        except BootseerError:
            return False
        return True

    def restart_count(self) -> int:
        return len(self.restarts.read_text())

    def end(self) -> None:
        (self.base / "end").touch()
        if self._process is None:
            return
        with contextlib.suppress(BootseerError):
            os.kill(self.daemon().pid, signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def folder_of(suite: str) -> Path:
    if suite == "this machine's":
        return programs()
    return Packages(REPOSITORY / ".venv/packages").unpacked(suite, "containerd") / "usr/bin"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder with a short path, as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="node-") as name:
        yield Path(name)


@pytest.fixture(params=["trixie", "forky"], ids=["1.7", "2.x"])
def machine(request: pytest.FixtureRequest, short_folder: Path) -> Iterator[Machine]:
    require("mount", "fuse")
    found = Machine(short_folder, folder_of(request.param))
    try:
        yield found
    finally:
        found.end()


@pytest.mark.parametrize(
    "config", [None, "", "version = 2\n", NODE], ids=["none", "empty", "least", "node"]
)
def test_our_lines_are_loaded_and_leave_no_trace(machine: Machine, config: str | None) -> None:
    daemon = machine.start(config)
    change = install(daemon, ADDRESS, PLATFORM)
    assert (change.is_file_changed, change.is_restarted) == (True, True)
    assert change.file == Path("/etc/containerd/config.toml")
    plugin, runtime = machine.daemon().loaded()
    assert plugin == ADDRESS
    assert runtime["snapshotter"] == "bootseer"
    if config == NODE:
        # The class is the node's default runtime, with another snapshotter.
        assert runtime["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"
        assert runtime["options"]["SystemdCgroup"] is True
        assert machine.config.with_name("config.toml.before-bootseer").read_text() == NODE
    # Nothing is done twice.
    again = install(machine.daemon(), ADDRESS, PLATFORM)
    assert (again.is_file_changed, again.is_restarted) == (False, False)
    assert machine.restart_count() == 1
    change = remove(machine.daemon(), ADDRESS)
    assert (change.is_file_changed, change.is_restarted) == (True, True)
    assert machine.daemon().loaded() == ("", {})
    assert (machine.config.read_text() if machine.config.exists() else None) == config
    assert [path.name for path in machine.config.parent.iterdir()] == (
        [] if config is None else ["config.toml"]
    )
    assert not remove(machine.daemon(), ADDRESS).is_restarted
    assert machine.restart_count() == 2


@pytest.mark.parametrize("target", ["/etc/containerd/site/a.toml", "site/a.toml"])
def test_a_link_to_the_file_stays_a_link(machine: Machine, target: str) -> None:
    """An absolute link is the node's, whose folder does not exist here."""
    kept = machine.config.with_name("site") / "a.toml"
    kept.parent.mkdir()
    kept.write_text(NODE)
    machine.config.symlink_to(target)
    install(machine.start(None), ADDRESS, PLATFORM)
    plugin, runtime = machine.daemon().loaded()
    assert plugin == ADDRESS
    assert runtime["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"
    assert os.readlink(machine.config) == target
    assert without_block(kept.read_text()) == NODE != kept.read_text()
    remove(machine.daemon(), ADDRESS)
    assert os.readlink(machine.config) == target
    assert kept.read_text() == NODE
    assert [path.name for path in kept.parent.iterdir()] == ["a.toml"]


@pytest.mark.parametrize("name", ["site", "site/config.toml"])
def test_a_link_that_leads_nowhere_is_named(machine: Machine, name: str) -> None:
    folder = machine.config.with_name("site")
    folder.mkdir()
    (folder / "config.toml").write_text("version = 2\n")
    daemon = machine.start(None, options="--config /etc/containerd/site/config.toml")
    link = machine.config.parent / name
    link.rename(link.with_name("moved"))
    link.symlink_to("/etc/containerd/nowhere")
    with pytest.raises(
        InvalidInputError, match=f"/etc/containerd/{name} .* dangling symbolic link"
    ):
        install(daemon, ADDRESS, PLATFORM)
    with pytest.raises(
        InvalidInputError, match=f"/etc/containerd/{name} .* dangling symbolic link"
    ):
        remove(daemon, ADDRESS)
    assert not machine.config.with_name("nowhere").exists()
    assert machine.restart_count() == 0


def test_what_others_write_in_between_stays(machine: Machine) -> None:
    install(machine.start("version = 2\n"), ADDRESS, PLATFORM)
    ours = machine.config.read_text()
    machine.config.write_text(
        ours.replace("version = 2\n", "version = 2\noom_score = -1\n") + "# end\n"
    )
    assert not install(machine.daemon(), ADDRESS, PLATFORM).is_restarted
    assert "oom_score = -1\n" in machine.config.read_text()
    remove(machine.daemon(), ADDRESS)
    assert machine.config.read_text() == "version = 2\noom_score = -1\n# end\n"


def test_a_start_that_was_cut_off_is_made_up_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill between file and restart, the next start restarts, and changes no file."""
    daemon = machine.start(NODE)
    with monkeypatch.context() as patch:
        patch.setattr(
            ContainerdDaemon, "restart", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            install(daemon, ADDRESS, PLATFORM)
    assert without_block(machine.config.read_text()) == NODE
    change = install(machine.daemon(), ADDRESS, PLATFORM)
    assert (change.is_file_changed, change.is_restarted) == (False, True)


def test_temporary_files_of_killed_installers_are_removed(machine: Machine) -> None:
    daemon = machine.start(NODE)
    for name in (".bootseer-0123456789abcdef", ".bootseer-0123456789abcdef.toml"):
        machine.config.with_name(name).write_text("left by a killed installer")
    install(daemon, ADDRESS, PLATFORM)
    names = {path.name for path in machine.config.parent.iterdir()}
    assert names == {"config.toml", "config.toml.before-bootseer"}


def test_a_configuration_that_containerd_refuses_is_left_alone(machine: Machine) -> None:
    machine.start("version = 2\n")
    machine.config.write_text("version = 2\n[broken")
    with pytest.raises(BootseerError, match="refuses its configuration"):
        install(machine.daemon(), ADDRESS, PLATFORM)
    assert machine.config.read_text() == "version = 2\n[broken"
    assert machine.restart_count() == 0
    assert machine.answers()


def test_lines_that_somebody_put_there_by_hand_are_named(machine: Machine) -> None:
    text = f'version = 2\n[proxy_plugins.bootseer]\ntype = "snapshot"\naddress = "{ADDRESS}"\n'
    machine.start(text)
    with pytest.raises(InvalidInputError, match=r"containerd\.install=false"):
        install(machine.daemon(), ADDRESS, PLATFORM)
    assert machine.config.read_text() == text


def test_a_file_whose_imports_hide_our_lines_is_left_alone(machine: Machine) -> None:
    """containerd 1.x takes the imported table of CRI in place of all of the main file's."""
    imported = machine.config.with_name("cri.toml")
    imported.write_text(NODE)
    text = 'version = 2\nimports = ["/etc/containerd/cri.toml"]\n'
    daemon = machine.start(text)
    if "v2" in version_of(machine.folder):
        install(daemon, ADDRESS, PLATFORM)
        _, runtime = machine.daemon().loaded()
        assert runtime["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"
        remove(machine.daemon(), ADDRESS)
    else:
        with pytest.raises(UnsupportedError, match="no imported file"):
            install(daemon, ADDRESS, PLATFORM)
        assert machine.restart_count() == 0
    assert machine.config.read_text() == text
    assert imported.read_text() == NODE


def test_a_containerd_that_does_not_come_back_gets_its_old_configuration(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.start(NODE)
    monkeypatch.setattr(installer, "RESTART_S", 1.0)
    # Whatever the cause: here nothing restarts it.
    with pytest.raises(DeadlineError, match="the old one is back"):
        install(machine.daemon("true"), ADDRESS, PLATFORM)
    assert machine.config.read_text() == NODE
    assert machine.answers()


# Runs a function of the installer again and again, in copies of this process. Each is killed before
# its next change to the node's files, and the last one when it asks for a restart.
KILLED_AT_EACH_STEP = """
import itertools, json, os, pathlib, signal, sys
from bootseer.kubernetes.containerd_process import ContainerdDaemon
from bootseer.kubernetes.containerd_config import install, remove

what, socket, config, asked, *words = sys.argv[1:]
config, asked = pathlib.Path(config), pathlib.Path(asked)
before = config.read_text()

CHANGES = ("write", "fsync", "rename", "replace", "unlink")

def kill_at(number):
    left = number
    def look(frame, event, argument):
        nonlocal left
        is_text = isinstance(getattr(argument, "__self__", None), str)  # str.replace
        if event == "c_call" and argument.__name__ in CHANGES and not is_text:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(look)

found = []
for number in itertools.count(1):
    pid = os.fork()
    if not pid:
        try:
            restart = f"touch {asked}; kill -KILL {os.getpid()}"
            daemon = ContainerdDaemon(pathlib.Path(socket), restart)
            kill_at(number)
            {"install": install, "remove": remove}[what](daemon, *words)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    found.append(config.read_text())
    config.write_text(before)
    if asked.exists():
        break
print(json.dumps(found))
"""


def left_by_kills(machine: Machine, what: str, *words: str) -> list[str]:
    """Return the configuration after each kill, from the first step to the last."""
    paths = (machine.socket, machine.config, machine.base / f"{what}-asked")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_STEP, what, *map(str, paths), *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


# The file is written in the same way for each version of containerd.
@pytest.mark.parametrize("machine", ["trixie"], ids=["1.7"], indirect=True)
def test_a_kill_at_each_step_leaves_the_old_or_the_new_file(machine: Machine) -> None:
    machine.start(NODE)
    install(machine.daemon(), ADDRESS, PLATFORM)
    new = machine.config.read_text()
    found = left_by_kills(machine, "remove", ADDRESS)
    assert found == sorted(found, key=[new, NODE].index)
    assert (found[0], found[-1]) == (new, NODE)
    remove(machine.daemon(), ADDRESS)
    found = left_by_kills(machine, "install", ADDRESS, PLATFORM)
    assert found == sorted(found, key=[NODE, new].index)
    assert (found[0], found[-1]) == (NODE, new)
    # Nor does anything stay that was beside it.
    machine.config.write_text(new)
    remove(machine.daemon(), ADDRESS)
    assert [path.name for path in machine.config.parent.iterdir()] == ["config.toml"]
    assert machine.config.read_text() == NODE


@pytest.mark.needs("mount", "fuse")
def test_a_containerd_that_knows_no_class_s_snapshotter_is_named(short_folder: Path) -> None:
    found = Machine(short_folder, programs())
    try:
        daemon = found.start("version = 2\n")
        if daemon.dump("version = 2\n")["version"] != 2:
            raise MissingError("this machine's containerd is not 1.6")
        with contextlib.suppress(UnsupportedError):
            install(daemon, ADDRESS, PLATFORM)
            raise MissingError("this machine's containerd is not 1.6")
        assert found.config.read_text() == "version = 2\n"
        assert found.restart_count() == 0
    finally:
        found.end()


def test_where_k3s_writes_the_file_its_own_ways_are_used(machine: Machine) -> None:
    folder = machine.config.parent / "rancher"
    folder.mkdir()
    is_version_3 = "v2" in version_of(machine.folder)
    expected = "config-v3.toml.tmpl" if is_version_3 else "config.toml.tmpl"
    text = "version = 3" if is_version_3 else "version = 2"
    before = K3S.replace("{base_text}", text).replace("{template}", expected)
    options = "--config /etc/containerd/rancher/config.toml"
    change = install(machine.start(None, before=before, options=options), ADDRESS, PLATFORM)
    assert change.file == Path("/etc/containerd/rancher") / expected
    assert change.is_restarted
    plugin, runtime = machine.daemon().loaded()
    assert (plugin, runtime["snapshotter"]) == (ADDRESS, "bootseer")
    again = install(machine.daemon(), ADDRESS, PLATFORM)
    assert (again.is_file_changed, again.is_restarted) == (False, False)
    assert remove(machine.daemon(), ADDRESS).is_restarted
    assert not (folder / expected).exists()
    assert machine.daemon().loaded() == ("", {})


def version_of(folder: Path) -> str:
    command = [str(folder / "containerd"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
