"""Servers that a real spawner starts outlive the container of the process that asked for them."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from bootseer.base.documents import to_builtins
from bootseer.errors import BootseerError, UnavailableError
from bootseer.fuse.striped.mounted.mount import mount_checkpoints, mount_spec
from bootseer.fuse.striped.mounted.options import CheckpointPlan
from bootseer.linux import mount_table, namespaces
from bootseer.linux.processes import stat_fields
from bootseer.prefetch.serve.plan import ServePlan
from bootseer.served import spawner as exchange
from bootseer.served.processes import CHECKPOINTS, SPAWNER, Role, start
from bootseer.served.service import live_mounts, services_dir
from bootseer.served.spawner import is_answering
from bootseer.settings.config import Settings
from testbed.cgroups import in_own_cgroup
from testbed.containers.containerd_node import ContainerdNode
from testbed.images.building import digest
from testbed.mounts.image_mounts import checksums_in_child, settings_at
from testbed.paths import REPOSITORY
from testbed.users import as_ordinary_user
from testbed.waiting import wait_for
from tests.prefetch.snapshotter.conftest import CHAINS, add_image, lower_of, pull

pytestmark = pytest.mark.needs("mount")


@contextlib.contextmanager
def running(
    run_dir: Path, address: Path, *options: str, prefix: Sequence[str] = ()
) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a spawner; at the end, wait until it has ended all of its servers."""
    command = [*prefix, sys.executable, "-m", "bootseer", "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [*command, "kubernetes", "spawner", "--address", str(address), *options], cwd=REPOSITORY
    )
    try:
        wait_for(lambda: is_answering(address))
        yield process
    finally:
        process.terminate()
        process.wait(90)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Where other users could reach it.
    with tempfile.TemporaryDirectory(prefix="spawner-", dir="/tmp") as folder:
        path = Path(folder) / "open/spawner.sock"
        path.parent.mkdir()
        for part in (path.parent, path.parent.parent):
            part.chmod(0o755)
        monkeypatch.setenv(SPAWNER, str(path))
        yield path


def _parent(pid: int) -> int:
    return int(stat_fields(pid)[1])


def test_a_process_is_the_spawners_and_reports_to_its_client(
    tmp_path: Path, address: Path, settings: Settings
) -> None:
    with running(tmp_path / "run", address) as spawner:
        spec = mount_spec(settings, f"file://{tmp_path}/stored", _made(tmp_path / "mount"))
        with mount_checkpoints(spec) as mounted:
            assert _parent(mounted.pid) == spawner.pid
            (mounted.directory / "step").write_bytes(b"saved")
        assert (tmp_path / "stored/step").read_bytes() == b"saved"
        # Reaped, too.
        assert not stat_fields(mounted.pid)


def test_a_failure_reaches_the_client(tmp_path: Path, address: Path, settings: Settings) -> None:
    (tmp_path / "stored").write_bytes(b"no folder")
    with running(tmp_path / "run", address):
        spec = mount_spec(settings, f"file://{tmp_path}/stored", _made(tmp_path / "mount"))
        with pytest.raises(BootseerError, match="stored"):
            mount_checkpoints(spec)
    assert mount_table.find_mount(tmp_path / "mount") is None


def test_a_process_that_is_given_up_is_killed(tmp_path: Path, address: Path) -> None:
    with running(tmp_path / "run", address) as spawner:
        process = start(CHECKPOINTS, tmp_path)
        assert _parent(process.pid) == spawner.pid
        assert not process.is_answered()
        process.abandon()
        assert not stat_fields(process.pid)


def test_variables_of_the_client_may_be_left_out(
    tmp_path: Path, address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the node")
    with running(tmp_path / "run", address):
        variables = {"AWS_SESSION_TOKEN": None, "AWS_ENDPOINT_URL": "https://mine"}
        with start(CHECKPOINTS, tmp_path, variables=variables) as process:
            told = Path(f"/proc/{process.pid}/environ")
            # It is another program once the spawner's fork has become it.
            wait_for(lambda: b"AWS_ENDPOINT_URL=https://mine\0" in told.read_bytes())
            assert b"AWS_SESSION_TOKEN" not in told.read_bytes()


def test_only_programs_of_ours_are_started(tmp_path: Path, address: Path) -> None:
    with running(tmp_path / "run", address):
        for module in ("http.server", "bootseer", "bootseer.cli", "os"):
            with pytest.raises(UnavailableError, match="not one of Bootseer's"):
                start(Role(module, "it"), tmp_path)


def test_what_is_no_request_is_refused(tmp_path: Path, address: Path) -> None:
    with running(tmp_path / "run", address):
        for data, fd_count in ((b"{}", 3), (b"\xff" * 9, 3), (b"x", 1), (b"?", 0)):
            assert b"failure" in _answer(address, data, fd_count)
        assert is_answering(address)


def _answer(address: Path, data: bytes, fd_count: int) -> bytes:
    """Return the spawner's answer to a request with `fd_count` files."""
    with (
        Path(os.devnull).open("r+b") as null,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        connection.connect(str(address))
        socket.send_fds(connection, [data], [null.fileno()] * fd_count)
        connection.settimeout(10)
        return connection.recv(4096)


def test_other_users_cannot_ask(tmp_path: Path, address: Path) -> None:
    ask = [sys.executable, "-c", _ASK, str(address)]
    nobody = as_ordinary_user()
    with running(tmp_path / "run", address):
        done = subprocess.run([*nobody, *ask], capture_output=True, cwd="/", check=False)
        assert b"PermissionError" in done.stderr
        # Nor where its file lets them in.
        address.chmod(0o666)
        done = subprocess.run([*nobody, *ask], capture_output=True, cwd="/", check=False)
        assert b"not permitted" in done.stdout, done.stderr


_ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    connection.send(b"e1fb2969590754b0")
    print(connection.recv(4096))
"""


def test_without_a_spawner_servers_are_forked_with_one_warning(
    tmp_path: Path, address: Path, settings: Settings
) -> None:
    folders = [_made(tmp_path / f"m{number}") for number in range(2)]
    done = _mounted_elsewhere(settings, f"file://{tmp_path}/stored", *folders)
    assert len(done.parents) == 2
    assert done.said == [
        f"cannot use the spawner at {address} ([Errno 2] No such file or directory): "
        "servers will end with this container"
    ]


def test_a_spawner_of_another_protocol_is_asked_for_nothing(
    tmp_path: Path, address: Path, settings: Settings
) -> None:
    """After an upgrade, a node works without its spawner until it is drained, with a warning."""
    with running(tmp_path / "run", address) as spawner:
        folder = _made(tmp_path / "mount")
        protocol = exchange.PROTOCOL + 1
        url = f"file://{tmp_path}/stored"
        done = _mounted_elsewhere(settings, url, folder, protocol=protocol)
        assert done.parents != [spawner.pid]
        (said,) = done.said
        assert "drain the node, and delete its pod of bootseer-mounts" in said
        # It lives: what was mounted before, and died, may be mounted anew.
        assert is_answering(address)


class _Mounted(NamedTuple):
    """Observations of a process that mounted folders one after the other."""

    parents: list[int]
    """Parents of the servers."""
    said: list[str]
    """Warnings about the spawner."""


def _mounted_elsewhere(
    settings: Settings, url: str, *folders: Path, protocol: int = exchange.PROTOCOL
) -> _Mounted:
    """Mount the storage in a process of its own, since a process warns of the spawner only once."""
    what = json.dumps([protocol, to_builtins(settings), url, list(map(str, folders))])
    done = subprocess.run(
        [sys.executable, "-c", _MOUNT, what],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name = f"{exchange.__name__}: "
    lines = done.stderr.splitlines()
    return _Mounted(
        json.loads(done.stdout),
        [line.removeprefix(name) for line in lines if line.startswith(name)],
    )


_MOUNT = """
import json, logging, sys
from pathlib import Path
from bootseer.base.documents import from_builtins
from bootseer.fuse.striped.mounted.mount import mount_checkpoints, mount_spec
from bootseer.linux.processes import stat_fields
from bootseer.served import spawner as exchange
from bootseer.settings.config import Settings

logging.basicConfig(format="%(name)s: %(message)s")
exchange.PROTOCOL, settings, url, folders = json.loads(sys.argv[1])
parents = []
for folder in folders:
    with mount_checkpoints(mount_spec(from_builtins(settings, Settings), url, Path(folder))) as one:
        parents.append(int(stat_fields(one.pid)[1]))
print(json.dumps(parents))
"""


def test_a_spawner_asked_in_another_protocol_says_its_own(tmp_path: Path, address: Path) -> None:
    line = b'{"protocol": 99, "program": "of another form"}'
    with running(tmp_path / "run", address):
        answer = json.loads(_answer(address, line, 3))
    assert answer["protocol"] == exchange.PROTOCOL
    assert "with protocol 99 instead of" in answer["failure"]


def test_plans_of_this_protocol_have_these_members() -> None:
    """Servers of the previous release read plans: where one of these changes, raise PROTOCOL.

    Then put the new digest here. Members with a default may be added and removed.
    """
    needed = sorted(_needed(exchange.SpawnRequest) | _needed(ServePlan) | _needed(CheckpointPlan))
    digest = hashlib.sha256("\n".join(needed).encode()).hexdigest()[:16]
    assert (exchange.PROTOCOL, digest) == (1, "e55a2944acab3a79"), needed


def _needed(struct: type[msgspec.Struct]) -> set[str]:
    """Return the members without which a struct, and those in it, cannot be read."""
    found = set()
    for field in msgspec.structs.fields(struct):
        if field.required:
            found.add(f"{struct.__name__}.{field.name}")
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                found |= _needed(field.type)
    return found


def test_a_tree_outlives_the_container_of_the_snapshotter(tmp_path: Path, address: Path) -> None:
    """A runtime ends every process of the container's cgroup."""
    with ContainerdNode(with_containerd=False) as node:
        with (
            running(node.settings.run_dir, address) as spawner,
            in_own_cgroup(node.snapshotter.pid) as container,
        ):
            add_image(node, tmp_path)
            pull(node)
            lower = lower_of(node.call("Prepare", key="c1", parent=CHAINS[-1]))
            ((_, state),) = live_mounts(node.settings.run_dir)
            assert _parent(state.pid) == spawner.pid
            (container / "cgroup.kill").write_text("1")
            node.stop(node.snapshotter, signal.SIGKILL)
            assert checksums_in_child([lower / "top"]) == [digest(b"t")[7:]]
            node.snapshotter = node.start_snapshotter()
            assert lower_of(node.call("Prepare", key="c2", parent=CHAINS[-1])) == lower
        # Nothing stays, also what a pod has of it.
        assert node.trees() == []
        assert not list(live_mounts(node.settings.run_dir))
        # The spawner has killed the image's publisher, which for a minute looks like a new one.
        shutil.rmtree(services_dir(node.settings.run_dir))


def test_the_end_writes_out_checkpoints_and_takes_off_volumes(
    tmp_path: Path, address: Path, settings: Settings
) -> None:
    volume = _made(tmp_path / "volume")
    with running(tmp_path / "run", address, "--grace", "10"):
        spec = mount_spec(settings, f"file://{tmp_path}/stored", _made(tmp_path / "mount"))
        mounted = mount_checkpoints(spec)
        namespaces.mount(mounted.directory, volume, flags=namespaces.MS_BIND)
        (volume / "step").write_bytes(b"s" * 2**23)
    assert (tmp_path / "stored/step").stat().st_size > 0
    assert mount_table.find_mount(tmp_path / "mount") is None
    assert mount_table.find_mount(volume) is None


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_at(tmp_path)


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path
