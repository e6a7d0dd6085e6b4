"""A Slurm of several nodes on this machine, from Debian's packages.

It runs munged, slurmctld and a slurmd for each node; with accounting also mariadbd and slurmdbd.
The controller and each node are a `SlurmMachine` with processes, mounts, network, control groups,
users and disks of their own. Slurm finds the processes of a step by their control group, as on most
clusters (proctrack/cgroup), where this machine has version 1; else by their parents
(proctrack/linuxproc).
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.needs import MissingError
from testbed.slurm.machine import (
    UNIFIED,
    SlurmMachine,
    addresses,
    environment_of,
    has_groups,
    machines,
    remove_groups,
)
from testbed.waiting import wait_for

_PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "unshare",
    "setpriv",
    "ip",
    "systemd-tmpfiles",
)
_ACCOUNTING_PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db")
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
USERS = {"alice": 2101, "bob": 2102}
"""Users of the cluster; this machine does not have them."""
KILL_WAIT_S = 8
"""Seconds between SIGTERM and SIGKILL of a step."""
REQUEUE_S = 10
"""Seconds for which a requeued job is held."""
_PREFIX = "bootseer-slurm-"
CONTROLLER = "controller"

_CONFIGURATION = """
ClusterName=test
SlurmctldHost=controller({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire={requeue_s}
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait={kill_wait_s}
SlurmdTimeout=20
InactiveLimit=0
MinJobAge=600

{accounting}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
{more}
"""
_DATABASE = """
AuthType=auth/munge
DbdHost=localhost
SlurmUser=root
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""
_CGROUP = {
    1: "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
    2: "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n",
}


def require_slurm(*, accounting: bool = False) -> None:
    """Raise MissingError if Slurm is not installed or cannot run here."""
    programs = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    missing = [name for name in programs if shutil.which(name, path=_PATH) is None]
    if missing:
        raise MissingError(
            f"needs Slurm (slurm-wlm, munge; for sacct slurmdbd, mariadb-server): there is no "
            f"{', '.join(missing)}"
        )
    if os.geteuid() != 0:
        raise MissingError("needs root, for the namespaces that stand for nodes")


class SlurmCluster:
    """A Slurm cluster.

    `configuration` are more lines of slurm.conf. `hierarchies` are the control groups of its nodes;
    where the default one is missing, processes are found by their parents. `slurmd_prefix` are
    words before slurmd's command.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node_count: int = 2,
        configuration: str = "",
        accounting: bool = False,
        hierarchies: Sequence[str] = ("freezer",),
        slurmd_prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._slurmd_prefix = slurmd_prefix
        self.hierarchies = hierarchies if has_groups(*hierarchies) else ()
        self.nodes = [f"n{number + 1}" for number in range(node_count)]
        self.machines: dict[str, SlurmMachine] = {}
        self.home = folder / "home"
        """Folder that all machines have as /home."""
        self.etc = folder / "etc"
        """Files that are added to /etc of all machines when they start."""
        self._configuration = configuration
        self._accounting = accounting
        for path in (self.home, self.etc / "slurm", folder / "munge"):
            path.mkdir(parents=True)
        self._write_configuration()
        for user, uid in USERS.items():
            (self.home / user).mkdir(mode=0o755)
            os.chown(self.home / user, uid, uid)

    # ---- its life -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator["SlurmCluster"]:
        """Start the cluster; at the end of the block everything is removed."""
        prefix = f"{_PREFIX}{os.getpid()}"
        names = [CONTROLLER, *self.nodes]
        with machines(names, self.folder, prefix, self.hierarchies) as found:
            self.machines = found
            self._start_all()
            yield self

    @property
    def controller(self) -> SlurmMachine:
        """Machine on which slurmctld runs and users log in."""
        return self.machines[CONTROLLER]

    def _start_all(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._start_munge(self.controller)
        if self._accounting:
            self._start_accounting()
        self.start_controller()
        for name in self.nodes:
            self._start_munge(self.machines[name])
            self.start_slurmd(name)
        count = len(self.nodes)
        wait_for(
            lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == f"{count} idle",
            f"{count} idle nodes: {self.controller.run('sinfo', '-R')}",
        )

    def _start_munge(self, machine: SlurmMachine) -> None:
        where = "/run/munge"
        machine.path(where).mkdir(mode=0o755, exist_ok=True)
        (machine.path(where) / "munge.socket.2").unlink(missing_ok=True)
        options = [f"--key-file={self.folder}/munge/key", f"--socket={where}/munge.socket.2"]
        options += [f"--{name}-file={where}/{name}" for name in ("pid", "log", "seed")]
        machine.start_process("munged", "--foreground", "--force", *options)
        wait_for((machine.path(where) / "munge.socket.2").exists, "munge's socket")

    def start_controller(self) -> None:
        """Start slurmctld."""
        self.controller.start_process("slurmctld", "-D")

    def start_slurmd(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.machines[name].start_process(*self._slurmd_prefix, "slurmd", "-D", "-N", name)

    def kill_slurmd(self, name: str) -> None:
        """Kill the node's slurmd by SIGKILL, and nothing else."""
        file = self.machines[name].path("/run/slurmd.pid")
        wait_for(file.exists, "slurmd's start")
        self.machines[name].run("kill", "-9", file.read_text().strip())
        file.unlink()

    def lose_node(self, name: str) -> None:
        """Kill Slurm's daemons and all processes of jobs on a node by SIGKILL."""
        self.machines[name].run("sh", "-c", "kill -9 -1")

    def lose_power(self, name: str) -> None:
        """Restart the machine of a node, without Slurm's daemons.

        Its mounts, control groups and the content of its memory are gone.
        """
        self.machines[name].lose_power(self.controller)

    def return_node(self, name: str) -> None:
        """Start a lost node's daemons again."""
        self._start_munge(self.machines[name])
        self.start_slurmd(name)

    # ---- its configuration ----------------------------------------------------------------------

    def _write_configuration(self) -> None:
        names = (CONTROLLER, *self.nodes)
        places = dict(zip(names, addresses(), strict=False))
        accounting = "AccountingStorageType=accounting_storage/none"
        if self._accounting:
            (self.etc / "slurm/slurmdbd.conf").write_text(_DATABASE)
            (self.etc / "slurm/slurmdbd.conf").chmod(0o600)
            accounting = (
                "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost"
            )
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={places[name]} CPUs=4 RealMemory=4000"
            for name in self.nodes
        )
        text = _CONFIGURATION.format(
            address=places[CONTROLLER],
            requeue_s=REQUEUE_S,
            kill_wait_s=KILL_WAIT_S,
            tracking="cgroup" if self.hierarchies else "linuxproc",
            accounting=accounting,
            nodes=nodes,
            more=self._configuration,
        )
        (self.etc / "slurm/slurm.conf").write_text(text)
        if self.hierarchies:
            version = 2 if UNIFIED in self.hierarchies else 1
            (self.etc / "slurm/cgroup.conf").write_text(_CGROUP[version])
        lines = ["127.0.0.1 localhost", *(f"{place} {name}" for name, place in places.items())]
        (self.etc / "hosts").write_text("\n".join(lines) + "\n")
        for file, row in (("passwd", "{0}:x:{1}:{1}::/home/{0}:/bin/sh"), ("group", "{0}:x:{1}:")):
            added = [row.format(user, uid) for user, uid in USERS.items()]
            text = Path("/etc", file).read_text() + "\n".join(added) + "\n"
            (self.etc / file).write_text(text)

    def _start_accounting(self) -> None:
        where = "/var/lib/mysql"
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={where}", "--user=root"]
        install += ["--auth-root-authentication-method=normal", "--skip-test-db"]
        done = self.controller.run(*install, timeout_s=120)
        assert done.returncode == 0, done.stderr
        socket_path = "/run/mysqld/mysqld.sock"
        self.controller.path("/run/mysqld").mkdir()
        options = [f"--datadir={where}", f"--socket={socket_path}", "--user=root"]
        small = ["--skip-networking", "--innodb-buffer-pool-size=16M"]
        self.controller.start_process("mariadbd", "--no-defaults", *options, *small)
        wait_for(self.controller.path(socket_path).exists, "MariaDB's socket")
        self.controller.start_process("slurmdbd", "-D")
        added = ("sacctmgr", "--immediate", "add", "cluster", "test")
        wait_for(lambda: "test" in self.run(*added), "the accounting of the cluster")

    # ---- its use --------------------------------------------------------------------------------

    def run(self, *command: str, user: str = "root", timeout_s: float = 60.0) -> str:
        """Run a command on the controller and return its output, or "" if it fails."""
        try:
            done = self.controller.run(*command, user=user, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def submit(self, *words: str, user: str = "alice", script: str = "") -> int:
        """Submit `script` as a user does, from the home folder; return the job's number."""
        done = subprocess.run(
            self.controller.command("sbatch", *words, user=user),
            env=environment_of(user),
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
        )
        found = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert found, done.stdout + done.stderr
        return int(found[1])

    def state(self, job: int | str) -> str:
        """Return the job's state, such as RUNNING."""
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", str(job)))
        return found[1] if found else ""

    def wait_for_state(self, job: int | str, *states: str, timeout_s: float = 120.0) -> str:
        """Wait until the job's state is one of `states`, and return it."""
        try:
            wait_for(
                lambda: self.state(job) in states,
                f"job {job} {' or '.join(states)}",
                timeout_s=timeout_s,
                interval_s=0.2,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: it is {self.state(job)}\n{self.logs()}") from None
        return self.state(job)

    def wait_for_idle(self, count: int | None = None) -> None:
        """Wait until `count` nodes (by default all) are idle: no epilog runs, none is drained."""
        wanted = f"{count or len(self.nodes)} idle"
        wait_for(
            lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == wanted, wanted, interval_s=0.2
        )

    def logs(self) -> str:
        """Return the ends of the daemons' logs and of the jobs' output."""
        logs = [path for one in self.machines.values() for path in one.path("/var/log").glob("*")]
        logs += [path for path in self.home.glob("*/*.out") if path.is_file()]
        shown = [f"--- {path}\n{path.read_text(errors='replace')[-6000:]}" for path in logs]
        return "\n".join([self.run("sinfo", "-R"), *shown])


@contextlib.contextmanager
def cluster_folder() -> Iterator[Path]:
    """Yield a folder for a cluster that its users may enter; remove those of killed test runs."""
    top = Path(tempfile.gettempdir())
    for old in top.glob(f"{_PREFIX}*"):
        owner = old.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)
            remove_groups(f"{_PREFIX}{owner}-*")
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=top))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_cluster(
    *, accounting: bool = False, files: Mapping[str, str] | None = None, **options: Any
) -> Iterator[SlurmCluster]:
    """Yield a cluster of two nodes with these files in /etc of all machines.

    `options` are those of `SlurmCluster`. Raises: MissingError.
    """
    require_slurm(accounting=accounting)
    with cluster_folder() as folder:
        cluster = SlurmCluster(folder, accounting=accounting, **options)
        for name, text in (files or {}).items():
            path = cluster.etc / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if text.startswith("#!") else 0o644)
        with cluster.running():
            yield cluster
