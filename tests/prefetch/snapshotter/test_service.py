"""The snapshotter called over its socket as containerd calls it, with real mounts."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from bootseer.prefetch.snapshotter.service import KIND_COMMITTED, MESSAGES
from bootseer.prefetch.snapshotter.snapshot import REF_LABEL
from testbed.containers.containerd_node import ContainerdNode
from testbed.mounts.image_mounts import bootseer, run_program
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for
from tests.prefetch.snapshotter.conftest import directories


def test_messages_are_encoded_as_containerd_does() -> None:
    request = MESSAGES["PrepareSnapshotRequest"](key="k", parent="p", labels={"a": "b"})
    assert request.SerializeToString() == b"\x12\x01k\x1a\x01p\x22\x06\x0a\x01a\x12\x01b"
    info = MESSAGES["Info"](name="n", kind=KIND_COMMITTED)
    info.created_at.seconds = 1
    assert info.SerializeToString() == b"\x0a\x01n\x18\x03\x22\x02\x08\x01"
    # Fields that a later release of containerd may send.
    later = request.SerializeToString() + b"\xfa\x01\x01x"
    assert MESSAGES["PrepareSnapshotRequest"].FromString(later).key == "k"


def test_ordinary_snapshots_live_as_containerd_wants_them(node: ContainerdNode) -> None:
    (mount,) = node.call("Prepare", key="a", labels={"x": "1"}).mounts
    assert (mount.type, list(mount.options)) == ("bind", ["rw", "rbind"])
    Path(mount.source, "file").write_bytes(b"f" * 10_000)
    assert node.call("Usage", key="a").size >= 10_000
    node.call("Commit", name="layer", key="a", labels={"y": "2"})
    info = node.call("Stat", key="layer").info
    assert (info.kind, dict(info.labels), info.parent) == (KIND_COMMITTED, {"y": "2"}, "")
    assert info.created_at.seconds > 1_500_000_000
    (above,) = node.call("Prepare", key="b", parent="layer").mounts
    assert above.type == "overlay"
    assert node.call("Mounts", key="b").mounts[0] == above
    (view,) = node.call("View", key="v", parent="layer").mounts
    assert (view.type, view.source, list(view.options)) == ("bind", mount.source, ["ro", "rbind"])
    assert node.refusal_code("Commit", name="x", key="v") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refusal_code("Remove", key="layer") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refusal_code("Mounts", key="layer") is grpc.StatusCode.FAILED_PRECONDITION
    assert node.refusal_code("Prepare", key="b") is grpc.StatusCode.ALREADY_EXISTS
    assert node.refusal_code("Prepare", key="c", parent="none") is grpc.StatusCode.NOT_FOUND
    assert node.refusal_code("Prepare", key="c", parent="b") is grpc.StatusCode.INVALID_ARGUMENT
    assert node.refusal_code("Stat", key="none") is grpc.StatusCode.NOT_FOUND
    assert {i.name for i in node.call("List", filters=["kind==committed"])} == {"layer"}
    updated = node.call(
        "Update", info={"name": "b", "labels": {"z": "3"}}, update_mask={"paths": ["labels.z"]}
    )
    assert dict(updated.info.labels) == {"z": "3"}
    for key in ("v", "b", "layer"):
        node.call("Remove", key=key)
    wait_for(lambda: not directories(node))
    assert node.call("List") == []


@pytest.mark.parametrize("label", ["../../../etc", "/etc/passwd", "sha256:../../x", "", "a\nb"])
def test_a_label_that_is_no_digest_is_refused(node: ContainerdNode, label: str) -> None:
    code = node.refusal_code("Prepare", key="extract", labels={REF_LABEL: label})
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert node.call("List") == []


def test_keys_are_never_paths(node: ContainerdNode) -> None:
    (mount,) = node.call("Prepare", key="../../../escape").mounts
    assert Path(mount.source).is_relative_to(node.root / "snapshots")
    assert node.refusal_code("Prepare", key="") is grpc.StatusCode.INVALID_ARGUMENT
    assert node.refusal_code("Prepare", key="a\0b") is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.needs("root")
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", small], check=True)
    try:
        with ContainerdNode(with_containerd=False, root=small / "root") as node:
            node.call("Prepare", key="before")
            filler = small / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            codes = {node.refusal_code("Prepare", key=f"full-{number}") for number in range(3)}
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert {info.name for info in node.call("List")} == {"before"}
            filler.unlink()
            node.call("Prepare", key="after")
            assert {info.name for info in node.call("List")} == {"before", "after"}
            wait_for(lambda: len(directories(node)) == 2)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_deep_directories_are_counted_and_removed(node: ContainerdNode) -> None:
    """Deeper than Python's recursion limit, and than a path can be."""
    (mount,) = node.call("Prepare", key="a").mounts
    run_program(
        """
import os, sys
os.chdir(sys.argv[1])
for _ in range(1500):
    os.mkdir("directory")
    os.chdir("directory")
""",
        mount.source,
    )
    assert node.call("Usage", key="a").inodes > 300
    node.call("Remove", key="a")
    wait_for(lambda: not directories(node) and not list((node.root / "removed").iterdir()))


def test_one_snapshotter_works_in_a_folder(node: ContainerdNode) -> None:
    options = ["--address", node.base / "second.sock", "--root", node.root]
    done = bootseer(node.settings, "snapshotter", *options)
    assert done.returncode == 19
    assert "another snapshotter" in done.stderr


def test_only_its_user_may_ask_it(node: ContainerdNode) -> None:
    assert (node.base / "snapshotter.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.needs("root")
def test_systemd_hears_that_it_is_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        # An abstract name that no other test run on this machine uses.
        name = f"bootseer-test-systemd-{os.getpid()}"
        receiver.bind("\0" + name)
        receiver.settimeout(60)
        command = [sys.executable, "-m", "bootseer", "--store", tmp_path / "store"]
        command += ["--cache-dir", tmp_path / "cache", "--run-dir", tmp_path / "run"]
        command += ["snapshotter", "--address", tmp_path / "s", "--root", tmp_path / "root"]
        process = subprocess.Popen(
            [str(argument) for argument in command],
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NOTIFY_SOCKET": f"@{name}"},
        )
        try:
            assert receiver.recv(100) == b"READY=1"
            process.terminate()
            assert receiver.recv(100) == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def refusal_code(code: str, root: Path) -> str:
    """Return the message of a program that ends before it makes the snapshotter's folder."""
    done = subprocess.run(
        [sys.executable, "-c", code, root],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 18
    assert not root.exists()
    return done.stderr


@pytest.mark.needs("root")
def test_without_root_the_command_says_so_and_makes_nothing(tmp_path: Path) -> None:
    code = """
import os, sys
import bootseer.cli.cluster, bootseer.prefetch.snapshotter.service
import bootseer.prefetch.snapshotter.core
from bootseer.cli.main import main
os.setuid(65534)
main(["snapshotter", "--root", sys.argv[1]])
"""
    tmp_path.chmod(0o777)
    assert "needs root" in refusal_code(code, tmp_path / "root")


@pytest.mark.usefixtures("fresh_interpreters")
def test_without_grpc_the_command_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["grpc"] = None
from bootseer.cli.main import main
main(["snapshotter", "--root", sys.argv[1]])
"""
    assert "bootseer[containerd]" in refusal_code(code, tmp_path / "root")


def test_a_probe_is_told_whether_it_answers(node: ContainerdNode) -> None:
    command = ("snapshotter", "--check", "--address")
    assert bootseer(node.settings, *command, node.base / "snapshotter.sock").returncode == 0
    done = bootseer(node.settings, *command, node.base / "none.sock")
    assert done.returncode == 17
    assert "none.sock" in done.stderr
