"""A node with a real containerd and the snapshotter, in folders of its own.

`ContainerdNode` starts `bootseer snapshotter` and containerd, and calls them as their clients do:
by `ctr`, and by CRI over gRPC as a kubelet does. `close` ends every process and removes every
mount.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from msgspec.structs import replace

from bootseer.base.closing import Closing
from bootseer.errors import BootseerError
from bootseer.fuse.kernel.unmount import detach
from bootseer.linux import mount_table
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.prefetch.snapshotter.service import MESSAGES, METHODS, SERVICE
from bootseer.served.control import ask
from bootseer.served.service import live_mounts
from bootseer.settings.config import Settings
from testbed.containers.containerd_config import containerd_config
from testbed.containers.cri import call_cri, container_config, pod_config
from testbed.mounts.fuse_mount import clear_mount
from testbed.mounts.image_mounts import TIMEOUT_S, Completed, settings_at
from testbed.needs import MissingError, require
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for, wait_started

BIN_VARIABLE = "BOOTSEER_TEST_CONTAINERD"
"""Variable that names a folder with `containerd`, `ctr` and shim of another version to test
with."""


def programs() -> Path:
    """Return the folder with containerd's programs. Raises: MissingError."""
    named = os.environ.get(BIN_VARIABLE)
    found = named or shutil.which("containerd")
    if found is None:
        raise MissingError("containerd is not installed")
    return Path(found) if named else Path(found).parent


class ContainerdNode(Closing):
    """Machine with a running snapshotter, and with containerd unless `with_containerd` is False."""

    def __init__(
        self,
        *,
        with_containerd: bool = True,
        linger_s: float = 0.0,
        root: Path | None = None,
        runtime_class: bool = False,
        pause_image: str = "",
        **changes: Any,
    ) -> None:
        require("root", "fuse")
        self._bin = programs() if with_containerd else Path("/usr/bin")
        # A socket's path must be short.
        self.base = Path(tempfile.mkdtemp(prefix="node-"))
        changes = {"deadline_s": 5.0, "auto_index": False, **changes}
        self.settings: Settings = replace(settings_at(self.base), **changes)
        self.root = root or self.base / "snapshotter"
        self._linger_s = linger_s
        self._runtime_class = runtime_class
        self._pause_image = pause_image
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        for name in ("cache", "cni"):
            (self.base / name).mkdir()
        try:
            self.snapshotter = self.start_snapshotter()
            if with_containerd:
                self.containerd = self.start_containerd()
        except BaseException:
            self.close()
            raise

    # ---- processes ----------------------------------------------------------------------------

    def start_snapshotter(self) -> "subprocess.Popen[bytes]":
        """Start the snapshotter and wait until it answers."""
        flags = ["--store", self.settings.store_url, "--cache-dir", self.settings.cache_dir]
        flags += ["--run-dir", self.settings.run_dir, "--workload", self.settings.workload]
        flags += ["--timeline-dir", self.settings.timeline_dir]
        options = ["--address", self.base / "snapshotter.sock", "--root", self.root]
        options += ["--linger", self._linger_s]
        options += ["--content", self.base / "root/io.containerd.content.v1.content"]
        options += ["--containerd", self.base / "containerd.sock"]
        with (self.base / "snapshotter.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bootseer", "-v"]
                + [str(argument) for argument in [*flags, "snapshotter", *options]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "BOOTSEER_DEADLINE": str(self.settings.deadline_s),
                    "BOOTSEER_AUTO_INDEX": "on" if self.settings.auto_index else "off",
                    "BOOTSEER_PUBLISH_TIMELINES": "on",
                },
            )
        self._processes.append(process)
        wait_started(process, self.snapshots_answered, (self.base / "snapshotter.log").read_text)
        return process

    def start_containerd(self) -> "subprocess.Popen[bytes]":
        """Start containerd and wait until CRI answers."""
        version = 3 if self.is_version("2") else 2
        config = containerd_config(
            self.base, version, runtime_class=self._runtime_class, pause_image=self._pause_image
        )
        (self.base / "config.toml").write_text(config)
        with (self.base / "containerd.log").open("ab") as log:
            process = subprocess.Popen(
                ["containerd", "--config", self.base / "config.toml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        self._processes.append(process)
        wait_started(process, self._cri_answers, (self.base / "containerd.log").read_text)
        return process

    def is_version(self, prefix: str) -> bool:
        """Return whether containerd's version begins with `prefix`, such as "2" or "1.6"."""
        command = [str(self._bin / "containerd"), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        return re.search(rf"\bv?{re.escape(prefix)}\.", done.stdout) is not None

    def stop(self, process: "subprocess.Popen[bytes]", sign: int = signal.SIGTERM) -> None:
        """Send the process a signal and wait for its end."""
        process.send_signal(sign)
        process.wait(TIMEOUT_S)
        self._processes.remove(process)

    def log(self) -> str:
        """Return the snapshotter's log."""
        return (self.base / "snapshotter.log").read_text()

    # ---- the snapshotter, as containerd calls it ----------------------------------------------

    def call(self, method: str, /, **fields: Any) -> Any:
        """Call a method of the snapshots service. Raises: grpc.RpcError."""
        request, response = METHODS[method]
        with grpc.insecure_channel(f"unix:{self.base}/snapshotter.sock") as channel:
            make = channel.unary_stream if method == "List" else channel.unary_unary
            caller = make(
                f"/{SERVICE}/{method}",
                request_serializer=MESSAGES[request].SerializeToString,
                response_deserializer=MESSAGES[response].FromString,
            )
            answer = caller(MESSAGES[request](**fields), timeout=TIMEOUT_S)
            if method == "List":
                return [info for part in answer for info in part.info]
            return answer

    def refusal_code(self, method: str, /, **fields: Any) -> Any:
        """Return the status code of a call that must fail."""
        try:
            self.call(method, **fields)
        except grpc.RpcError as error:
            return error.code()
        raise AssertionError(f"{method} was not refused")

    def snapshots_answered(self) -> bool:
        """Return whether the snapshotter answers."""
        try:
            self.call("List")
        except grpc.RpcError:
            return False
        return True

    # ---- containerd's clients -----------------------------------------------------------------

    def ctr(self, *arguments: object, check: bool = True) -> Completed:
        """Run `ctr` in CRI's namespace; fail the test if `check` and it fails."""
        done = self.start_ctr(*arguments)
        try:
            out, err = done.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            done.kill()
            raise AssertionError(f"ctr {arguments} did not end") from None
        if check:
            assert done.returncode == 0, f"{arguments}: {err}\n{self.log()}\n{self.image_logs()}"
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    def start_ctr(self, *arguments: object) -> "subprocess.Popen[str]":
        """Start `ctr` in CRI's namespace."""
        return subprocess.Popen(
            ["ctr", "--address", str(self.base / "containerd.sock"), "--namespace", "k8s.io"]
            + [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )

    def run(self, reference: str, name: str, *command: object, options: Sequence[str] = ()) -> str:
        """Run a container and return its output.

        Its shim writes the output to a file: `ctr` has lost the end of an output on a busy machine.
        """
        printed = self.base / f"printed-{name}"
        flags = ["run", "--rm", "--snapshotter", "bootseer", "--log-uri", f"file://{printed}"]
        self.ctr(*flags, *options, reference, name, *command)
        return printed.read_text()

    def run_succeeds(self, reference: str, name: str, *command: object) -> bool:
        """Return whether a container can be run.

        The answer may be late: containerd waits before it tries a broken socket again.
        """
        flags = ["run", "--rm", "--snapshotter", "bootseer", reference, name, *command]
        done = self.ctr(*flags, check=False)
        if done.returncode:
            self.ctr("container", "rm", name, check=False)
        return done.returncode == 0

    def start(self, reference: str, name: str, *command: object) -> None:
        """Start a container in the background."""
        self.ctr("run", "--detach", "--snapshotter", "bootseer", reference, name, *command)

    def execute(self, name: str, *command: object, user: str = "0:0") -> str:
        """Run a command in a running container and return its output.

        The shim writes the output to a file, as in `run`.
        """
        printed = self.base / f"printed-exec-{time.monotonic_ns()}"
        flags = ["--exec-id", printed.name, "--log-uri", f"file://{printed}", "--user", user]
        self.ctr("task", "exec", *flags, name, *command)
        return printed.read_text()

    def command_succeeds(self, name: str, *command: object) -> bool:
        """Return whether a command in a running container succeeds."""
        identity = f"exec-{time.monotonic_ns()}"
        done = self.ctr("task", "exec", "--exec-id", identity, name, *command, check=False)
        return done.returncode == 0

    def remove(self, name: str) -> None:
        """Kill and remove a container."""
        # The process of a container whose image is gone may have ended.
        self.ctr("task", "kill", "--signal", "SIGKILL", name, check=False)
        wait_for(lambda: self.ctr("task", "rm", name, check=False).returncode == 0)
        self.ctr("container", "rm", name)

    def collect_garbage(self) -> None:
        """Make containerd remove everything that no container or image uses, and wait for that.

        containerd collects after each removal, too, but leaves what it cannot remove to the next
        time.
        """
        lease = self.ctr("leases", "create").stdout.strip()
        self.ctr("leases", "delete", "--sync", lease)

    def wait_for_unmounts(self) -> None:
        """Wait until every image that no container uses is unmounted."""

        def is_removed() -> bool:
            # Repeated, since containerd leaves what it cannot remove at once to the next
            # collection.
            self.collect_garbage()
            return not self.trees()

        try:
            wait_for(is_removed, "the removal of the trees")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.snapshots()}\n{self.log()}") from None

    def cri(self, method: str, /, **fields: Any) -> Any:
        """Call a method of CRI. Raises: grpc.RpcError."""
        return call_cri(self.base / "containerd.sock", method, **fields)

    def pull(self, reference: str, annotations: Mapping[str, str] | None = None) -> None:
        """Pull as a kubelet does for a pod with these annotations, over plain HTTP."""
        self.pull_at_once(reference, 1, annotations)

    def pull_at_once(
        self, reference: str, count: int, annotations: Mapping[str, str] | None = None
    ) -> None:
        """Pull the image `count` times concurrently."""
        host = reference.partition("/")[0]
        folder = self.base / "certs.d" / host
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(f'server = "http://{host}"\n[host."http://{host}"]\n')
        with ThreadPoolExecutor(count) as pool:
            pod = pod_config("", annotations)
            fields = {"image": {"image": reference}, "sandbox_config": pod}
            pulls = [pool.submit(self.cri, "PullImage", **fields) for _ in range(count)]
            for future in pulls:
                future.result(TIMEOUT_S)

    def can_pull(self, reference: str, annotations: Mapping[str, str]) -> bool:
        """Return whether a pull succeeds."""
        try:
            self.pull(reference, annotations)
        except grpc.RpcError:
            return False
        return True

    def run_pod(
        self,
        name: str,
        image: str,
        *command: str,
        variables: Mapping[str, str] | None = None,
        restart_count: int = 0,
    ) -> "PodHandle":
        """Start a pod with one container of a pulled image, as a kubelet does."""
        config = pod_config(name)
        pod = self.cri("RunPodSandbox", config=config).id
        wanted = container_config(name, image, command, variables or {}, restart_count)
        container = self.cri("CreateContainer", pod=pod, config=wanted, pod_config=config).id
        self.cri("StartContainer", id=container)
        return PodHandle(self, pod, container)

    def remove_image(self, reference: str) -> None:
        """Remove an image, and wait for the removal of its snapshots."""
        self.cri("RemoveImage", image={"image": reference})
        self.ctr("images", "rm", "--sync", reference, check=False)

    def _cri_answers(self) -> bool:
        try:
            self.cri("ListImages")
        except grpc.RpcError:
            return False
        return True

    # ---- images' servers ----------------------------------------------------------------------

    def status(self, state_dir: Path) -> dict[str, Any]:
        """Return the status that the server of a mount reports."""
        return ask(state_dir, "status")

    def image_logs(self) -> str:
        """Return the logs of the image servers that wrote last."""
        logs = sorted((self.settings.run_dir / "logs").glob("*.log"), key=os.path.getmtime)
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs[-3:])

    def image_server_ids(self) -> list[int]:
        """Return the process ids of the image servers, supervisors first."""
        found = []
        for _, state in list(live_mounts(self.settings.run_dir)):
            children = Path(f"/proc/{state.pid}/task/{state.pid}/children")
            with contextlib.suppress(OSError):  # the server may end meanwhile
                found += [state.pid, *map(int, children.read_text().split())]
        return found

    def kill_image_servers(self) -> None:
        """Kill all image servers, as the machine's end would, and wait until no mount is served."""
        for pid in self.image_server_ids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not list(live_mounts(self.settings.run_dir)))

    # ---- state of the node --------------------------------------------------------------------

    def trees(self) -> list[Path]:
        """Return the mount points of images."""
        paths = (mount.path for mount in mount_table.find_mounts("bootseer"))
        return [path for path in paths if path.is_relative_to(self.base)]

    def snapshots(self) -> Mapping[str, Any]:
        """Return the snapshotter's snapshots by key."""
        return {info.name: info for info in self.call("List")}

    def close(self) -> None:
        """End all containers and processes, and remove all mounts and folders."""
        if hasattr(self, "containerd"):
            for line in self.ctr("task", "ls", "-q", check=False).stdout.split():
                self.ctr("task", "rm", "--force", line, check=False)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)
        _unmount_below(self.base)
        wait_published(self.settings, TIMEOUT_S)
        wait_for(lambda: not list(live_mounts(self.settings.run_dir)))
        shutil.rmtree(self.base, ignore_errors=True)


class PodHandle(Closing):
    """Running pod with one container."""

    def __init__(self, node: ContainerdNode, identity: str, container: str) -> None:
        self._node = node
        self._identity = identity
        self._container = container

    def execute(self, *command: str) -> str:
        """Run a command in the container and return its output."""
        fields = {"id": self._container, "command": command, "timeout": int(TIMEOUT_S)}
        done = self._node.cri("ExecSync", **fields)
        assert done.code == 0, done.err
        return str(done.out.decode())

    def close(self) -> None:
        """Stop and remove the pod, as a kubelet does."""
        self._node.cri("StopPodSandbox", id=self._identity)
        self._node.cri("RemovePodSandbox", id=self._identity)


def _unmount_below(base: Path) -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    paths = [Path(line.split()[4]) for line in lines]
    for path in reversed([path for path in paths if path.is_relative_to(base)]):
        # A killed server may hold a mount that another server waits for. Detaching a mount then
        # blocks until the connection is aborted.
        clear_mount(path)
        with contextlib.suppress(BootseerError):
            detach(path, lazy=True)
