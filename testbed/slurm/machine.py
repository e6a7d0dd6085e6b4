"""A machine of a Slurm cluster: namespaces and control groups on this machine, and its own disks.

The namespaces are of mounts, processes, network, host name, IPC and control groups. The first
machine of a cluster is the switch of its network. A machine ends with the process that made it, and
takes every process and mount along. The real machine is not changed: changes to /etc are in an
overlay. Run as a program, this module is a machine's first process.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.linux import namespaces
from testbed.paths import REPOSITORY
from testbed.waiting import pause, polling, wait_for

OWN = ("/tmp", "/run", "/var/tmp", "/var/log", "/var/spool", "/var/cache", "/var/lib", "/mnt")
"""Folders of a machine's own, in memory, empty at first."""
DISKS = ("/var/tmp", "/var/log", "/var/spool", "/var/cache", "/var/lib")
"""Folders of OWN that keep their content when the machine loses its power."""
HOMES = "/home"
"""Folder that all machines share."""
ETC = "/etc"
CGROUPS = Path("/sys/fs/cgroup")
UNIFIED = "unified"
"""Hierarchy of version 2; a hierarchy of version 1 has the name of its controller."""
_END_S = 20.0


def has_groups(*hierarchies: str) -> bool:
    """Return whether this machine has these hierarchies of control groups."""
    return all((CGROUPS / one / "cgroup.procs").exists() for one in hierarchies)


class SlurmMachine:
    """Machine of a Slurm cluster.

    `folder` is the cluster's, with `etc` (files added to /etc) and `home`. The machine has a group
    of its own in each of the `hierarchies`.
    """

    def __init__(
        self, name: str, folder: Path, prefix: str, address: str, hierarchies: Sequence[str]
    ) -> None:
        self.name = name
        self.address = address
        self._folder = folder
        self._group = f"{prefix}-{name}"
        self._hierarchies = hierarchies
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def start(self) -> None:
        """Start the machine's first process, which reaps orphans."""
        groups = [CGROUPS / one / self._group for one in self._hierarchies]
        for group in groups:
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (group / name).exists():
                    (group / name).write_text((group.parent / name).read_text())
        enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
        plan = {
            "name": self.name,
            "folder": str(self._folder),
            "hierarchies": self._hierarchies,
            "shown": [str(REPOSITORY), sys.base_prefix, sys.prefix, str(self._folder)],
        }
        apart = ["--mount", "--uts", "--ipc", "--net", "--pid", "--propagation", "private"]
        apart += ["--cgroup"] if self._hierarchies else []
        # The machine was switched on just now: slurmd reports the time of the boot to the
        # controller.
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        apart += ["--time", f"--boottime=-{int(up_s)}"]
        log = (self._folder / f"{self.name}.log").open("wb")
        with log:
            self._first = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "sh", "-ec", f'{enter}exec "$@"', "sh",
                 "taskset", "--cpu-list", str(_lowest_cpu()),
                 "unshare", *apart, "--fork", "--kill-child=KILL",
                 sys.executable, "-m", "testbed.slurm.machine", json.dumps(plan)],
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._first.stdout is not None
        said = self._first.stdout.readline()
        if said != b"ready\n":
            log_text = (self._folder / f"{self.name}.log").read_text()
            raise RuntimeError(f"the machine {self.name} did not start: {log_text}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self._pid = int(children.read_text().split()[0])

    def connect(self, switch: "SlurmMachine") -> None:
        """Connect the machine to the network of the machine `switch`, which may be itself."""
        here, there = [*self.network_command(), "ip"], [*switch.network_command(), "ip"]
        if self is switch:
            device = "bridge"
            steps = [[*here, "link", "add", "bridge", "type", "bridge"]]
        else:
            device, port = "eth0", f"to-{self.name}"
            pair = ["type", "veth", "peer", "name", device, "netns", str(self._pid)]
            steps = [
                [*there, "link", "add", port, *pair],
                [*there, "link", "set", port, "master", "bridge", "up"],
            ]
        steps += [
            [*here, "addr", "add", f"{self.address}/24", "dev", device],
            [*here, "link", "set", device, "up"],
            [*here, "link", "set", "lo", "up"],
        ]
        for step in steps:
            subprocess.run(step, check=True)

    def network_command(self) -> list[str]:
        """Return the words that run a command of the real machine in this machine's network."""
        return ["nsenter", f"--net=/proc/{self._pid}/ns/net"]

    def command(self, *command: str, user: str = "root") -> list[str]:
        """Return the words that run `command` on the machine in a log-in of this user."""
        words = ["nsenter", "--target", str(self._pid), "--all", f"--wdns={_home(user)}"]
        if user != "root":
            words += ["setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        return [*words, *command]

    def start_process(
        self, *command: str, user: str = "root", log: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on the machine."""
        output: Any = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            if log is not None:
                output = stack.enter_context(log.open("ab"))
            return subprocess.Popen(
                self.command(*command, user=user),
                env=environment_of(user),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def run(
        self,
        *command: str,
        user: str = "root",
        timeout_s: float = 60.0,
        variables: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the machine, and wait for its end."""
        return subprocess.run(
            self.command(*command, user=user),
            env={**environment_of(user), **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def processes(self) -> list[str]:
        """Return the command lines of all processes but the machine's first one and `ps` itself."""
        shown = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        lines = [line.strip().partition(" ") for line in shown]
        return [args.strip() for pid, _, args in lines if pid != "1" and "ps -eo" not in args]

    def mounts(self) -> list[str]:
        """Return the mount points of FUSE file systems and overlays, except /etc."""
        return [where for where in _mounted(self._pid) if where != ETC]

    def path(self, inside: str) -> Path:
        """Return the path by which this machine's root user reaches a path of it."""
        return Path(f"/proc/{self._pid}/root") / inside.lstrip("/")

    def lose_power(self, switch: "SlurmMachine") -> None:
        """Kill everything on the machine and switch it on again; only its disks are kept."""
        self.run("sh", "-c", "kill -9 -1")
        wait_for(lambda: not self.processes(), f"the end of all that runs on {self.name}")
        with tempfile.TemporaryDirectory(dir=self._folder) as kept:
            places = [place[1:] for place in DISKS]
            subprocess.run(["cp", "-a", "--parents", *places, kept], cwd=self.path("/"), check=True)
            subprocess.run([*switch.network_command(), "ip", "link", "del", f"to-{self.name}"])
            self.end()
            self.start()
            self.connect(switch)
            for place in places:
                copy = ["cp", "-a", f"{kept}/{place}/.", str(self.path(place))]
                subprocess.run(copy, check=True)

    def end(self) -> None:
        """End everything that runs on the machine."""
        first, self._first = self._first, None
        if first is not None:
            first.kill()
            first.wait()
            assert first.stdout is not None
            first.stdout.close()
        remove_groups(self._group)


def _home(user: str) -> str:
    return "/" if user == "root" else f"{HOMES}/{user}"


def environment_of(user: str) -> dict[str, str]:
    """Return the environment of a log-in of this user."""
    programs = Path(sys.executable).parent
    return {
        "HOME": "/tmp" if user == "root" else _home(user),
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "LC_ALL": "C.UTF-8",
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }


def addresses() -> Iterator[str]:
    """Yield addresses for the machines of a cluster; no other network sees them."""
    return (f"10.217.0.{number}" for number in range(1, 255))


_NUMBER = """
import fcntl, os, sys
get_mount_namespace_id = 0x8008B705  # NS_GET_MNTNS_ID
found = fcntl.ioctl(os.open("/proc/self/ns/mnt", os.O_RDONLY), get_mount_namespace_id, bytes(8))
print(int.from_bytes(found, sys.byteorder))
"""


def _lowest_cpu() -> int:
    """Return the CPU on which new mount namespaces get the lowest numbers.

    Linux 6.18 numbers mount namespaces for each CPU, and refuses to bind a namespace's file if its
    number is below the caller's. Slurm binds those of jobs (job_container/tmpfs).
    """
    numbers = {}
    for cpu in os.sched_getaffinity(0):
        words = ["taskset", "--cpu-list", str(cpu), "unshare", "--mount", sys.executable]
        done = subprocess.run([*words, "-c", _NUMBER], capture_output=True)
        numbers[cpu] = int(done.stdout or 0)  # older kernels have no such number: any CPU will do
    return min(numbers, key=lambda cpu: numbers[cpu])


# ---- control groups ---------------------------------------------------------------------------


def remove_groups(name: str) -> None:
    """Remove control groups once no process runs in them; `name` may be a pattern."""
    for _ in polling(_END_S, 0.05):
        left = list(CGROUPS.glob(f"*/{name}"))
        for group in left:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if not any(group.exists() for group in left):
            return


# ---- a machine's first process ----------------------------------------------------------------


def _main(plan: dict[str, Any]) -> None:
    """Mount the machine's folders, print "ready", and reap orphans for ever."""
    folder = Path(plan["folder"])
    subprocess.run(["hostname", plan["name"]], check=True)
    # Folders below a replaced folder are mounted again.
    shown = [(Path(path), os.open(path, os.O_PATH)) for path in plan["shown"]]
    sources = {name: os.open(folder / name, os.O_PATH) for name in ("home", "etc")}
    for where in reversed(_mounted("self")):
        namespaces.unmount(where)  # the real machine's mounts, which stay there
    for one in plan["hierarchies"]:
        if one == UNIFIED:
            namespaces.mount("none", CGROUPS, "cgroup2", 0, "")
            (CGROUPS / "system.slice").mkdir()
        else:
            namespaces.unmount(CGROUPS / one)
            namespaces.mount("none", CGROUPS / one, "cgroup", 0, one)
    closed = {_closed_above(path) for path, _ in shown} - {None}
    for place in sorted({*OWN, *filter(None, closed)}):
        mode = "1777" if place in ("/tmp", "/var/tmp") else "755"
        namespaces.mount("none", place, "tmpfs", 0, f"mode={mode}")
    for path, descriptor in shown:
        if not path.exists():
            path.mkdir(parents=True)
            _bind(descriptor, path)
    _bind(sources["home"], Path(HOMES))
    for name in ("upper", "work"):
        Path(f"/run/etc/{name}").mkdir(parents=True)
    layer = "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work"
    namespaces.mount("etc", ETC, "overlay", 0, layer)
    added = f"/proc/self/fd/{sources['etc']}/."
    subprocess.run(["cp", "-a", added, ETC], check=True, pass_fds=[sources["etc"]])
    for descriptor in (*sources.values(), *(fd for _, fd in shown)):
        os.close(descriptor)
    namespaces.mount("proc", "/proc", "proc", 0, "")
    # The real machine's /dev/fuse may be for root alone.
    os.mknod("/run/fuse", 0o020666, os.stat("/dev/fuse").st_rdev)
    os.chmod("/run/fuse", 0o666)
    namespaces.mount("/run/fuse", "/dev/fuse", "", namespaces.MS_BIND, "")
    for name in ("spool/slurmd", "spool/slurmctld"):
        Path("/var", name).mkdir()
    if Path("/etc/tmpfiles.d/bootseer.conf").exists():
        subprocess.run(["systemd-tmpfiles", "--create", "bootseer.conf"], check=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            pause(0.2)


def _mounted(pid: int | str) -> list[str]:
    """Return the mount points of FUSE file systems and overlays of a process."""
    rows = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    kinds = [(row[4], row[row.index("-") + 1]) for row in rows]
    return [where for where, kind in kinds if kind.startswith("fuse") or kind == "overlay"]


def _bind(descriptor: int, target: Path) -> None:
    namespaces.mount(f"/proc/self/fd/{descriptor}", target, "", namespaces.MS_BIND, "")


def _closed_above(path: Path) -> str | None:
    """Return the first folder on the way to `path` that only root may enter, if any."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return str(parent)
    return None


@contextlib.contextmanager
def machines(
    names: Sequence[str], folder: Path, prefix: str, hierarchies: Sequence[str]
) -> Iterator[dict[str, SlurmMachine]]:
    """Yield machines with these names on one network; end them with the block."""
    found = {
        name: SlurmMachine(name, folder, prefix, address, hierarchies)
        for name, address in zip(names, addresses(), strict=False)
    }
    try:
        for machine in found.values():
            machine.start()
            machine.connect(found[names[0]])
        yield found
    finally:
        for machine in found.values():
            machine.end()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
