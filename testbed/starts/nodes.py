"""Nodes on one machine, each with its own network, disk rate and share of the processor.

A node is a network namespace on a bridge, which is in a namespace itself, and control groups (v1 or
v2) in which its processes run. The pressure, throttling and network figures that its processes note
are therefore the node's own. Everything is removed at the end. Needs root.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from testbed.needs import MissingError
from testbed.network import run_network_command
from testbed.waiting import polling

_CGROUPS = Path("/sys/fs/cgroup")
_SETNS_NET = 0x40000000
# Burst of a line, and time that its packets may queue.
_BURST, _QUEUE = "64kb", "400ms"


class NamespaceNode:
    """Node of `Nodes`; `run` starts a command on it."""

    def __init__(self, site: "Nodes", number: int) -> None:
        self.name = f"node-{number}"
        self.address = f"10.213.0.{number + 2}"
        self._site = site
        self._netns = f"{site.name}-{number}"
        self._port = f"port{number}"
        self._folders = [root / f"{site.name}-{number}" for root in _hierarchies()]

    def make(self) -> None:
        """Make the node's network and control groups."""
        inside, switch = ["ip", "-n", self._netns], self._site.switch
        run_network_command(["ip", "netns", "add", self._netns])
        pair = ["type", "veth", "peer", "name", self._port, "netns", switch]
        run_network_command([*inside, "link", "add", "eth0", *pair])
        run_network_command(
            ["ip", "-n", switch, "link", "set", self._port, "master", "bridge", "up"]
        )
        run_network_command([*inside, "addr", "add", f"{self.address}/24", "dev", "eth0"])
        run_network_command([*inside, "link", "set", "eth0", "up"])
        run_network_command([*inside, "link", "set", "lo", "up"])
        for folder in self._folders:
            folder.mkdir()

    def remove(self) -> None:
        """Kill every process on the node, and remove its network and control groups."""
        for folder in self._folders:
            for _ in polling(5, 0.1):
                with contextlib.suppress(OSError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    folder.rmdir()
                if not folder.exists():
                    break
        subprocess.run(["ip", "netns", "del", self._netns], capture_output=True, check=False)

    def prefer(self) -> None:
        """Let other programs of this machine disturb the node hardly."""
        self._write("cpu", "cpu.shares", "262144", "cpu.weight", "10000")

    def limit_disk(self, folder: Path, bytes_per_s: int) -> None:
        """Limit the rate at which the node reads from the disk that `folder` is on."""
        device = _whole_disk(os.stat(folder).st_dev)
        self._write(
            "blkio", "blkio.throttle.read_bps_device", f"{device} {bytes_per_s}",
            "io.max", f"{device} rbps={bytes_per_s}",
        )  # fmt: skip

    def limit_line(self, mbit_per_s: float) -> None:
        """Limit the rate at which the node receives from the network."""
        qdisc = ["tc", "-n", self._site.switch, "qdisc", "replace", "dev", self._port, "root"]
        rate = f"{int(mbit_per_s * 1000)}kbit"
        run_network_command([*qdisc, "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE])

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], folder: Path, output: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a command on the node; its output goes to the file `output`."""
        groups = " ".join(f"{one}/cgroup.procs" for one in self._folders)
        enter = f'for g in {groups}; do echo $$ > "$g"; done; exec "$@"'
        with output.open("wb") as file:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._netns}", "sh", "-ec", enter, "sh", *command],
                env={**variables, "BOOTSEER_NODE": self.name},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _write(self, controller: str, old: str, old_value: str, new: str, new_value: str) -> None:
        for folder in self._folders:
            if (folder / new).exists():
                (folder / new).write_text(new_value)
                return
            if folder.parent.name.partition(",")[0] == controller and (folder / old).exists():
                (folder / old).write_text(old_value)
                return
        raise MissingError(f"there is no control group that limits {controller}")


class Nodes:
    """The nodes, and the network between them."""

    def __init__(self, count: int) -> None:
        self.name = f"bsn{os.getpid()}"
        self.switch = f"{self.name}-s"
        self.address = "10.213.0.1"
        """Address at which a server is reached from all nodes."""
        self.nodes = [NamespaceNode(self, number) for number in range(count)]

    def make(self) -> None:
        """Make the network and all nodes. Raises: MissingError."""
        run_network_command(["ip", "netns", "add", self.switch])
        run_network_command(["ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge"])
        run_network_command(
            ["ip", "-n", self.switch, "addr", "add", f"{self.address}/24", "dev", "bridge"]
        )
        run_network_command(["ip", "-n", self.switch, "link", "set", "bridge", "up"])
        run_network_command(["ip", "-n", self.switch, "link", "set", "lo", "up"])
        for node in self.nodes:
            node.make()

    def remove(self) -> None:
        """Remove all nodes and the network."""
        for node in self.nodes:
            node.remove()
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True, check=False)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Put the calling thread on the nodes' network: all nodes reach servers that it starts."""
        library = ctypes.CDLL(None, use_errno=True)
        with (
            Path("/proc/thread-self/ns/net").open("rb") as before,
            Path(f"/run/netns/{self.switch}").open("rb") as after,
        ):
            if library.setns(after.fileno(), _SETNS_NET) != 0:
                raise MissingError(f"cannot enter a network: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                library.setns(before.fileno(), _SETNS_NET)


@contextlib.contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Yield `count` nodes on one network. Raises: MissingError."""
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            raise MissingError(f"there is no {tool}; apt install iproute2 util-linux")
    if os.geteuid() != 0:
        raise MissingError("nodes with a network and control groups of their own need root")
    site = Nodes(count)
    try:
        try:
            site.make()
        except OSError as error:
            raise MissingError(f"no control group for a node: {error}") from error
        yield site
    finally:
        site.remove()


def _hierarchies() -> list[Path]:
    """Return the folders in which control groups are made: v2's, or those of v1's controllers."""
    if (_CGROUPS / "cgroup.controllers").exists():
        with contextlib.suppress(OSError):
            (_CGROUPS / "cgroup.subtree_control").write_text("+cpu +io")
        return [_CGROUPS]
    found = [_CGROUPS / name for name in ("cpu", "cpu,cpuacct", "blkio", "unified")]
    return list({path.resolve(): path for path in found if path.exists()}.values())


def _whole_disk(device: int) -> str:
    """Return MAJOR:MINOR of the disk that holds a partition."""
    name = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block") / name
    if not place.exists():
        raise MissingError("this folder is on no disk whose rate could be limited")
    if (place / "partition").exists():
        return (place.resolve().parent / "dev").read_text().strip()
    return name
