"""Machines of the cluster: each has namespaces, cgroups, and a folder that is its disk.

`Lan` is the network of all machines, and the machine of the control plane: a network namespace with
a bridge, and a process namespace that holds those of all nodes. The end of its first process ends
everything, and it ends with the thread that made it. A killed test therefore leaves only folders
and empty cgroups, which the next test removes, and the machine's own network is never changed. Not
thread-safe, but commands may be run from several threads.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bootseer.base.closing import Closing
from testbed.needs import MissingError
from testbed.processes import killed_with_parent, process_tree
from testbed.waiting import polling, wait_started

CGROUPS = Path("/sys/fs/cgroup")
GROUP = "bootseer-kubernetes"
ADDRESS = "10.77.0.1"
"""Address of the control plane, the registry and HDFS."""

_START_DEADLINE_S = 20.0
_COMMAND_DEADLINE_S = 120.0
# Kubelets set these for the whole machine. On a node they are ordinary files, so that writing them
# changes nothing.
_KERNEL_SETTINGS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
)  # fmt: skip

# A copy of this machine's FUSE mounts would keep them alive.
_LEAVE_MOUNTS = """awk '$3 ~ /^fuse/ {print $2}' /proc/self/mounts |
  while read -r mount; do umount -l "$mount" || true; done
"""
_LAN_SCRIPT = f"""set -eu
{_LEAVE_MOUNTS}mount -t proc proc /proc
ip link set lo up
ip link add lan type bridge
ip address add {ADDRESS}/24 dev lan
ip link set lan up
echo 1 > /proc/sys/net/ipv4/ip_forward
exec "$1"
"""
# `$1` is the init, `$2` the disk, and the other words are the hierarchies of cgroups.
_NODE_SCRIPT = """set -eu
init=$1 disk=$2; shift 2
mount -t proc proc /proc
for folder in lib cache log; do
  mkdir -p "$disk/$folder"
  mount --bind "$disk/$folder" "/var/$folder"
done
mkdir -p "$disk/etc" "$disk/etc-work" "$disk/settings"
mount -t overlay -o "lowerdir=/etc,upperdir=$disk/etc,workdir=$disk/etc-work" overlay /etc
mount -t tmpfs -o mode=755 tmpfs /run
for setting in $SETTINGS; do
  file="$disk/settings/$(echo "$setting" | tr / -)"
  cat "/proc/sys/$setting" > "$file"
  mount --bind "$file" "/proc/sys/$setting"
done
umount -l -R /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
for hierarchy; do
  mkdir "/sys/fs/cgroup/$hierarchy"
  case $hierarchy in systemd) options=none,name=systemd ;; *) options=$hierarchy ;; esac
  mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$hierarchy"
done
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
mount --make-rshared /
exec "$init"
"""


class ClusterMachine(Closing):
    """First process in new namespaces, from `start` to `kill`."""

    _namespaces: tuple[str, ...] = ()
    _enters: tuple[str, ...] = ()

    def __init__(self, name: str, folder: Path, init: Path) -> None:
        self.name = name
        self.folder = folder
        self.disk = folder / "disk"
        self.logs = folder / "logs"
        self.pid = 0
        self._init = init
        self._root: subprocess.Popen[bytes] | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._group = f"{GROUP}/{folder.parent.name}/{name}"
        for each in (self.disk, self.logs):
            each.mkdir(parents=True, exist_ok=True)

    @property
    def is_on(self) -> bool:
        """Whether the machine's first process lives."""
        return self._root is not None and self._root.poll() is None

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        for hierarchy in hierarchies():
            make_group(CGROUPS / hierarchy / self._group)
        with (self.logs / "init.log").open("ab") as log:
            self._root = subprocess.Popen(
                self._in_groups(killed_with_parent(command)), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env={**os.environ, **environment}, start_new_session=True,
            )  # fmt: skip
        root = self._root
        try:
            found = wait_started(
                root,
                lambda: [pid for pid in process_tree(root.pid) if _program(pid) == self._init],
                lambda: (self.logs / "init.log").read_text(errors="replace").strip()[-500:],
                timeout_s=_START_DEADLINE_S,
                error=MissingError,
            )
        except MissingError as error:
            self.kill()
            raise MissingError(f"no namespaces for {self.name}: {error}") from None
        self.pid = found[-1]

    def entering(self, command: Sequence[str | Path], *, in_group: bool = True) -> list[str]:
        """Return a command that runs `command` on the machine."""
        words = ["nsenter", "--target", str(self.pid), *self._enters, "--", *map(str, command)]
        return self._in_groups(words) if in_group else words

    def _in_groups(self, command: Sequence[str]) -> list[str]:
        folders = [str(CGROUPS / hierarchy / self._group) for hierarchy in hierarchies()]
        script = 'n=$1; shift; while [ $n -gt 0 ]; do echo 0 > "$1/cgroup.procs"; shift; '
        script += 'n=$((n-1)); done; exec "$@"'
        return ["sh", "-c", script, "sh", str(len(folders)), *folders, *command]

    def run(
        self,
        *command: str | Path,
        text: str | None = None,
        timeout_s: float = _COMMAND_DEADLINE_S,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, with `text` as its input.

        Raises: AssertionError with its output if `check` and it fails.
        """
        given = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(
            self.entering(command), capture_output=True, text=True, timeout=timeout_s,
            env={**os.environ, **(env or {})}, check=False, **given,
        )  # fmt: skip
        if check and done.returncode != 0:
            words = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise AssertionError(f"{self.name}: {' '.join(map(str, command))}: {words}")
        return done

    def daemon(self, name: str, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run a program as long as the machine is on; its output goes to `logs`."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                killed_with_parent(self.entering(command)), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env={**os.environ, **(env or {})}, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str, size: int = 3000) -> str:
        """Return the end of a program's log."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    def kill(self) -> None:
        """Kill the first process and thereby all others at once, as a power failure does."""
        root, self._root = self._root, None
        if root is not None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            else:
                root.kill()
            root.wait()
        self.pid = 0
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        for hierarchy in hierarchies():
            remove_group(CGROUPS / hierarchy / self._group)

    def close(self) -> None:
        """Power off; the disk remains."""
        self.kill()


class Lan(ClusterMachine):
    """Network of all machines, and machine of the control plane."""

    _enters = ("--mount", "--pid", "--net")

    def start(self) -> None:
        """Start the machine with a bridge that has the address of the control plane."""
        new = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
        self._start([*new, "sh", "-c", _LAN_SCRIPT, "sh", str(self._init)], {})


class ClusterNode(ClusterMachine):
    """Node on the bridge, with the address 10.77.0.(10 + number).

    Its pods have addresses of 10.88.(number).0/24.
    """

    _enters = ("--mount", "--pid", "--net", "--cgroup", "--uts")

    def __init__(self, lan: Lan, number: int, folder: Path, init: Path) -> None:
        super().__init__(f"node{number}", folder, init)
        self.lan = lan
        self.number = number
        self.address = f"10.77.0.{10 + number}"
        self.pods = f"10.88.{number}.0/24"

    def start(self, others: Sequence["ClusterNode"]) -> None:
        """Switch the node on, with routes between its pods and those of the others."""
        own = ["unshare", "--mount", "--pid", "--net", "--cgroup", "--uts", "--fork"]
        own += ["--kill-child", "--propagation", "private"]
        script = ["sh", "-c", _NODE_SCRIPT, "sh", str(self._init), str(self.disk), *hierarchies()]
        command = self.lan.entering([*own, *script], in_group=False)
        self._start(command, {"SETTINGS": " ".join(_KERNEL_SETTINGS)})
        # The process id in the lan's process namespace.
        (status,) = (
            line.split()
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if line.startswith("NSpid:")
        )
        lan, port = self.lan, f"port{self.number}"
        lan.run("ip", "link", "delete", port, check=False)
        lan.run(
            "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", status[2]
        )
        lan.run("ip", "link", "set", port, "master", "lan", "up")
        lan.run("ip", "route", "replace", self.pods, "via", self.address)
        self.run("hostname", self.name)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", ADDRESS)
        for other in others:
            self.run("ip", "route", "add", other.pods, "via", other.address)

    def wipe(self) -> None:
        """Remove everything from the disk of a node that is off."""
        assert not self.is_on, f"{self.name} is on"
        remove_folder(self.disk)
        self.disk.mkdir()


def _program(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink()
    return None


def hierarchies() -> list[str]:
    """Return the names of the version 1 hierarchies of cgroups."""
    return [path.name for path in sorted(CGROUPS.iterdir()) if (path / "cgroup.procs").exists()
            and path.name != "unified"]  # fmt: skip


def make_group(folder: Path) -> None:
    """Make a cgroup and its parents; its cpuset allows all that its parent's allows."""
    for each in [*reversed(folder.parents), folder]:
        if len(each.parts) > len(CGROUPS.parts) + 1:
            each.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (each / name).exists():
                    (each / name).write_text((each.parent / name).read_text())


def remove_group(folder: Path) -> None:
    """Remove a cgroup and its children as soon as their last processes have gone."""
    for _ in polling(_START_DEADLINE_S):
        for each, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(each).rmdir()
        if not folder.exists():
            return


def remove_folder(folder: Path) -> None:
    """Remove a disk, immutable files included; waits for mounts of ended namespaces."""
    subprocess.run(["chattr", "-R", "-f", "-i", str(folder)], capture_output=True, check=False)
    for _ in polling(_START_DEADLINE_S, 0.1):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    raise AssertionError(f"{folder} cannot be removed")
