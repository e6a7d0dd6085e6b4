"""The checkpoint sidecar for Kubernetes, run as a kubelet runs it.

Mount namespaces stand for a pod's containers, with the volumes, propagation and commands of the
manifest.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bootseer.fuse.striped.mounted.mount import make_immutable
from bootseer.fuse.striped.tools.copy import copy_out, open_storage
from testbed.mounts.fuse_mount import run
from testbed.needs import MissingError, require
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for
from tests.fuse.striped.support.mounting import settings_in

pytestmark = pytest.mark.needs("mount", "fuse")

RECIPE = REPOSITORY / "docker" / "kubernetes" / "checkpoints-sidecar.yaml"
MOUNTED = "/mnt/checkpoints"
_PROPAGATION = {"Bidirectional": "rshared", "HostToContainer": "rslave"}

SAVE = f"""
import os, sys
old = os.open("{MOUNTED}/model", os.O_WRONLY | os.O_TRUNC)
os.write(old, b"a" * 3_000_000)
print("saving", flush=True)
sys.stdin.readline()
os.write(old, b"b" * 3_000_000)
os.close(old)
"""


class PodNode:
    """Node with one shared volume, and the containers that are started on it."""

    def __init__(self, folder: Path) -> None:
        pod = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
        containers = [*pod["initContainers"], *pod["containers"]]
        self.containers: dict[str, Any] = {one["name"]: one for one in containers}
        self.folder = folder
        self.volume = folder / "volume"
        self.volume.mkdir(parents=True)
        self._started: list[subprocess.Popen[str]] = []
        holder = self._start(["unshare", "--mount", "--propagation", "private"])
        assert holder.stdout is not None
        assert holder.stdout.readline() == "\n"
        self._enter = ["nsenter", f"--target={holder.pid}", "--mount"]
        self.on_node("mount", "--bind", self.volume, self.volume)
        self.on_node("mount", "--make-rshared", self.volume)

    def _start(self, prefix: list[str], command: str = "echo; read end") -> "subprocess.Popen[str]":
        """Run `command` in a new mount namespace until its standard input ends."""
        process = subprocess.Popen(
            [*prefix, "sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "BOOTSEER_RUN_DIR": str(self.folder / "run"),
            },
        )
        self._started.append(process)
        return process

    def on_node(self, *command: str | Path) -> str:
        done = run([*self._enter, *command])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def container(self, name: str, command: str = "") -> "subprocess.Popen[str]":
        """Start a container with its own or another command."""
        said = self.containers[name]
        (mount,) = [m for m in said["volumeMounts"] if m["mountPath"] == "/mnt"]
        steps = [
            f"mount --rbind {shlex.quote(str(self.volume))} /mnt",
            f"mount --make-{_PROPAGATION[mount['mountPropagation']]} /mnt",
        ]
        if mount.get("readOnly"):
            # Propagation of the volume alone, as runc sets it.
            steps.append("mount -o remount,bind,ro /mnt")
        words = [*said["command"], *said.get("args", ())]
        own = shlex.join(words).replace("hdfs://namenode:8020", self.folder.as_uri())
        own = own.replace("bootseer ", f"{shlex.quote(sys.executable)} -m bootseer ")
        prefix = [*self._enter, "unshare", "--mount", "--propagation", "unchanged"]
        return self._start(prefix, " && ".join([*steps, f"exec {command or own}"]))

    def in_container(
        self, container: "subprocess.Popen[str]", *command: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container as `kubectl exec` does."""
        return run(["nsenter", f"--target={container.pid}", "--mount", *command], deadline_s=30)

    def is_mounted(self) -> bool:
        return f" {self.volume}/checkpoints fuse.bootseer-stripe " in self.on_node(
            "cat", "/proc/self/mounts"
        )

    def kill_all(self, container: "subprocess.Popen[str]") -> None:
        """Kill every process of a container, as when its memory limit is exceeded."""
        pid = container.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            os.kill(one, signal.SIGKILL)
        container.wait(60)

    def end(self) -> None:
        with contextlib.suppress(AssertionError):
            while self.is_mounted():
                self.on_node("umount", "--lazy", self.volume / "checkpoints")
            # Undo make_immutable, so that the folder can be removed.
            self.on_node("chattr", "-i", self.volume / "checkpoints")
        for process in reversed(self._started):
            process.kill()
            process.communicate(timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # A user's processes reach their folders through /mnt only.
    require("mount", "fuse")
    return tmp_path


@contextlib.contextmanager
def node_with(folder: Path) -> Iterator[PodNode]:
    node = PodNode(folder)
    try:
        yield node
    finally:
        node.end()


def test_a_pod_that_is_killed_and_ended_loses_nothing(folder: Path) -> None:
    with node_with(folder) as node:
        trainer = node.container("trainer", "sh -c 'echo; read end'")
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "\n"
        write = ("sh", "-c", f"mkdir -p {MOUNTED}; echo saved > {MOUNTED}/model")
        # Before the mount exists, no save reaches the node's disk.
        assert node.in_container(trainer, *write).returncode != 0
        container = node.container("checkpoints")
        wait_for(node.is_mounted, "the mount")
        done = node.in_container(trainer, "setpriv", "--reuid=1000", "--clear-groups", *write)
        assert done.returncode == 0, done.stderr
        node.kill_all(container)
        # Nor after the server was killed.
        assert node.in_container(trainer, *write).returncode != 0
        container = node.container("checkpoints")
        check = ("grep", "-q", "saved", f"{MOUNTED}/model")
        wait_for(lambda: node.in_container(trainer, *check).returncode == 0, "the next mount")
        saving = subprocess.Popen(
            ["nsenter", f"--target={trainer.pid}", "--mount", sys.executable, "-c", SAVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert saving.stdout is not None
        assert saving.stdout.readline() == "saving\n"
        container.send_signal(signal.SIGTERM)
        wait_for(lambda: not node.is_mounted(), "the end of the mount")
        # The running save is finished, and the next one refused.
        assert node.in_container(trainer, *write).returncode != 0
        saving.communicate("\n", timeout=30)
        assert saving.returncode == 0
        assert container.wait(60) == 0
        # A kubelet can remove the pod's folders.
        assert f" {node.volume}/" not in node.on_node("cat", "/proc/self/mounts")
        assert os.listdir(node.volume / "checkpoints") == []
    with open_storage(settings_in(folder), (folder / "checkpoints").as_uri()) as storage:
        assert [info.path for info in storage.tree.stored.entries("")] == ["model"]
        copy_out(storage, "model", folder / "model")
    assert (folder / "model").read_bytes() == b"a" * 3_000_000 + b"b" * 3_000_000


def test_a_sidecar_leaves_a_folder_that_can_be_removed(folder: Path) -> None:
    """A kubelet that cannot remove an immutable folder in the volume never ends the pod."""
    with node_with(folder) as node:
        container = node.container("checkpoints")
        wait_for(node.is_mounted, "the mount")
        container.send_signal(signal.SIGTERM)
        assert container.wait(60) == 0
        (node.volume / "checkpoints").rmdir()


@pytest.mark.needs("mount", "fuse")
def test_an_immutable_mount_point_takes_no_files(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "bootseer", "--run-dir", str(tmp_path / "run")]
    command += ["checkpoint", "mount"]
    try:
        make_immutable(place)
    except OSError as error:
        raise MissingError(
            f"the file system of {tmp_path} has no such attribute: {error}"
        ) from error
    try:
        for _ in range(2):
            done = run([*command, "--immutable", (tmp_path / "stored").as_uri(), place])
            assert done.returncode == 0, done.stderr
            run(["sh", "-c", f"echo x > {place}/file"])
            assert (tmp_path / "stored" / "file").read_text() == "x\n"
            assert run([*command[:-2], "unmount", place]).returncode == 0
            with pytest.raises(PermissionError):
                (place / "other").touch()
    finally:
        subprocess.run(["chattr", "-i", str(place)], check=True)
    (place / "other").touch()
    done = run([*command, "--immutable", (tmp_path / "stored").as_uri(), place])
    assert done.returncode == 2
    assert "move them away" in done.stderr
