"""Stand-in of a kubelet, with a real CSI driver."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from bootseer.base.closing import Closing
from bootseer.errors import BootseerError
from bootseer.fuse.kernel.unmount import detach
from bootseer.kubernetes.csi.service import IDENTITY, MESSAGES, METHODS, NODE
from bootseer.linux import mount_table
from bootseer.linux.processes import start_time
from bootseer.served.service import ServiceState, live_mounts
from bootseer.settings.config import Settings
from bootseer.snapshots.archive import create_snapshot
from testbed.mounts.image_mounts import TIMEOUT_S, settings_at
from testbed.needs import require
from testbed.paths import REPOSITORY
from testbed.waiting import polling, wait_for

CONTAINER = ["unshare", "--mount", "--propagation", "unchanged", "--"]
_END_S = 10.0
CAPABILITY = {"mount": {}, "access_mode": {"mode": 5}}


class Kubelet(Closing):
    """Kubelet of a node as the driver sees it, until closed."""

    def __init__(
        self,
        *options: str,
        in_container: bool = False,
        deadline_s: float = 5.0,
        store_url: str = "",
        node: str = "node-1",
    ) -> None:
        """Make the folders and start the driver.

        Args:
            store_url: Store of the node; by default a folder of its own.
            node: Name of the node.
            in_container: Whether the driver has a mount namespace of its own, with mounts in this
                folder propagated both ways (`Bidirectional`).
        """
        require("root", "fuse")
        # A socket's path must be short.
        self.base = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp"))
        self.folder = self.base / "kubelet"
        self.folder.mkdir()
        self.settings: Settings = replace(settings_at(self.base), node=node, deadline_s=deadline_s)
        if store_url:
            self.settings = replace(self.settings, store_url=store_url)
        self.settings.cache_dir.mkdir()
        self._options = options
        self._prefix = CONTAINER if in_container else []
        if in_container:
            subprocess.run(["mount", "--bind", "--make-shared", self.base, self.base], check=True)
        self.driver = self.start_driver()

    def start_driver(self) -> "subprocess.Popen[bytes]":
        """Start the driver, and wait until it answers."""
        settings = self.settings
        flags = ["--store", settings.store_url, "--cache-dir", str(settings.cache_dir)]
        flags += ["--run-dir", str(settings.run_dir), "--workload", settings.workload]
        flags += ["--timeline-dir", str(settings.timeline_dir), "-v", "kubernetes", "csi"]
        flags += ["--kubelet-dir", str(self.folder), *self._options]
        with (self.base / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "bootseer", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env=_environment(settings),
            )
        wait_for(lambda: process.poll() is not None or self.answers())
        assert process.poll() is None, self.log()
        return process

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Signal the driver, and wait for its end."""
        self.driver.send_signal(sign)
        self.driver.wait(TIMEOUT_S)

    def restart(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """Replace the driver by another one, as after an upgrade or a crash."""
        self.stop(sign)
        self.driver = self.start_driver()

    def log(self) -> str:
        """Return the driver's log."""
        return (self.base / "driver.log").read_text()

    @property
    def socket(self) -> Path:
        """Path of the driver's socket."""
        return self.folder / "plugins/csi.bootseer.io/csi.sock"

    def call(
        self, method: str, service: str = NODE, path: Path | None = None, **fields: Any
    ) -> Any:
        """Make a call of the driver. Raises: grpc.RpcError."""
        request, response = METHODS[service][method]
        with grpc.insecure_channel(f"unix:{path or self.socket}") as channel:
            caller = channel.unary_unary(
                f"/{service}/{method}",
                request_serializer=MESSAGES[request].SerializeToString,
                response_deserializer=MESSAGES[response].FromString,
            )
            return caller(MESSAGES[request](**fields), timeout=TIMEOUT_S)

    def answers(self) -> bool:
        """Return whether the driver answers."""
        try:
            return bool(self.call("Probe", IDENTITY).ready.value)
        except grpc.RpcError:
            return False

    def target(self, pod: str) -> Path:
        """Return the path of a pod's volume; the kubelet makes its parent."""
        path = self.folder / f"pods/{pod}/volumes/kubernetes.io~csi/data/mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def publish(
        self,
        pod: str,
        context: Mapping[str, str],
        *,
        readonly: bool = False,
        secrets: Mapping[str, str] | None = None,
    ) -> Path:
        """Publish a volume for a pod. Raises: grpc.RpcError."""
        target = self.target(pod)
        self.call(
            "NodePublishVolume",
            volume_id=f"csi-{pod}",
            target_path=str(target),
            volume_capability=CAPABILITY,
            readonly=readonly,
            volume_context=context,
            secrets=secrets or {},
        )
        return target

    def let_others_in(self) -> None:
        """Make the targets reachable for other users' processes, as in containers."""
        for path in (self.base, *(self.folder / "pods").rglob("kubernetes.io~csi/*")):
            for part in (path, *path.parents):
                if part.is_relative_to(self.base):
                    part.chmod(0o755)

    def unpublish(self, pod: str) -> None:
        """Unpublish a pod's volume. Raises: grpc.RpcError."""
        target = str(self.target(pod))
        self.call("NodeUnpublishVolume", volume_id=f"csi-{pod}", target_path=target)

    def stats(self, pod: str) -> Any:
        """Return the driver's statistics of a pod's volume. Raises: grpc.RpcError."""
        target = str(self.target(pod))
        return self.call("NodeGetVolumeStats", volume_id=f"csi-{pod}", volume_path=target)

    def servers(self) -> list[ServiceState]:
        """Return the servers of this node, the oldest first."""
        return [state for _, state in live_mounts(self.settings.run_dir)]

    def kill_servers(self, *, only_worker: bool = False) -> None:
        """Kill all servers by SIGKILL, or only the workers, which the servers start again."""
        for server in self.servers():
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            for pid in [*([] if only_worker else [server.pid]), *map(int, children)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not only_worker:
            wait_for(lambda: not self.servers())

    def mounted(self) -> list[Path]:
        """Return the mount points below the kubelet's folder."""
        paths = [Path(point.path.decode()) for point in mount_table.mount_points()]
        return [path for path in paths if path.is_relative_to(self.folder)]

    def make_environment(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Publish a snapshot of a directory with these files; return the directory."""
        directory = self.base / "made" / name
        for path, data in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(data)
        create_snapshot(self.settings, [str(directory)], name)
        return directory

    def close(self) -> None:
        """End the driver and all servers."""
        if self.driver.poll() is None:
            self.stop()
        self._end_servers()
        if self._prefix:
            detach(self.base, lazy=True)
        shutil.rmtree(self.base, ignore_errors=True)

    def _end_servers(self) -> None:
        deadline_s = time.monotonic() + _END_S
        for _ in polling(inf, 0.05):
            servers = self.servers()
            if not servers:
                return
            # Repeatedly: a server that a driver started just before its end mounts after that.
            for path in reversed(self.mounted()):
                with contextlib.suppress(BootseerError):
                    detach(path, lazy=True)
            # A mount namespace that another test has made meanwhile has copies of these mounts.
            for pid, started in servers[0].processes if time.monotonic() > deadline_s else ():
                if started and start_time(pid) == started:
                    os.kill(pid, signal.SIGKILL)


def _environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "BOOTSEER_NODE": settings.node,
        "BOOTSEER_DEADLINE": str(settings.deadline_s),
        "BOOTSEER_AUTO_INDEX": "off",
        "BOOTSEER_PUBLISH_TIMELINES": "on",
    }


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    """Yield a node with a driver that allows checkpoint volumes at any remote address."""
    with Kubelet() as started:
        yield started


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Kubelet]:
    """Yield a node whose checkpoint volumes are in a folder of the test's."""
    with Kubelet("--source", (tmp_path / "stored").as_uri()) as started:
        yield started


def refused(call: Any, *arguments: Any, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the sentence of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **fields)
    return caught.value.code(), str(caught.value.details())
