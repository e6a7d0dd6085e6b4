"""A Slurm of two nodes on this machine, with Debian's own packages: munged, slurmctld, two slurmd;
with accounting also mariadbd and slurmdbd.

A node is a namespace of mounts, processes and host name, so that each has a folder of its own under
`Slurm.local`, mounts that the other does not see, and nothing that outlives it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.support.waiting import wait_for

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
_ACCOUNTING_PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db")
NODES = ("n1", "n2")
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))


def require_slurm(*, accounting: bool = False) -> None:
    """Skip the test where Slurm is not installed, or cannot be run."""
    programs = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    missing = [name for name in programs if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(
            f"needs Slurm (slurm-wlm, munge; for sacct slurmdbd, mariadb-server): there is no "
            f"{', '.join(missing)}"
        )
    if os.geteuid() != 0:
        pytest.skip("needs root, for the namespaces that stand for nodes")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(int(one.getsockname()[1]))
        return ports


_DATABASE = """
AuthType=auth/munge
AuthInfo=socket={f}/munge/socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
PidFile={f}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


class Slurm:
    """A running cluster; a context manager that ends all of it."""

    def __init__(self, folder: Path, *, accounting: bool = False) -> None:
        self.folder = folder
        self._accounting = accounting
        self.local = folder / "local"
        """Each node's own, empty at first."""
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": _PATH,
            "LC_ALL": "C",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for name in ("state", "munge", "local"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        lines = ["127.0.0.1 localhost", *(f"127.0.0.1 {name}" for name in NODES)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "slurm.conf").write_text(self._configuration())
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configuration(self) -> str:
        control, database, *ports = _free_ports(2 + len(NODES))
        f = self.folder
        accounting = ""
        if self._accounting:
            (f / "slurmdbd.conf").write_text(_DATABASE.format(f=f, port=database))
            (f / "slurmdbd.conf").chmod(0o600)
            accounting = (
                "AccountingStorageType=accounting_storage/slurmdbd\n"
                f"AccountingStorageHost=localhost\nAccountingStoragePort={database}\n"
                f"AccountingStoragePass={f}/munge/socket"
            )
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=1"
            for name, port in zip(NODES, ports, strict=True)
        )
        return f"""
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={f}/munge/socket
CredType=cred/munge
StateSaveLocation={f}/state
SlurmdSpoolDir={f}/spool-%n
SlurmctldPidFile={f}/slurmctld.pid
SlurmdPidFile={f}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
{accounting}
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    cwd="/",
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _start_all(self) -> None:
        munge = self.folder / "munge"
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={munge / file}" for option, file in files.items()]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        wait_for((munge / "socket").exists, "munge's socket")
        if self._accounting:
            self._start_accounting()
        self._start("slurmctld", ["slurmctld", "-D"])
        local, hosts = (shlex.quote(str(self.folder / name)) for name in ("local", "hosts"))
        for name in NODES:
            steps = [
                f"hostname {name}",
                f"mount --bind {hosts} /etc/hosts",
                f"mount -t tmpfs none {local}",
                # The first process of the namespace has to reap what the job leaves behind.
                f"{{ slurmd -D -N {name} & wait; }}",
            ]
            apart = ["--mount", "--uts", "--pid", "--mount-proc", "--propagation", "private"]
            ending = ["--fork", "--kill-child=KILL"]
            self._start(name, ["unshare", *apart, *ending, "sh", "-ec", " && ".join(steps)])
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", "two nodes")

    def _start_accounting(self) -> None:
        data, socket_path = self.folder / "data", self.folder / "mariadb.sock"
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={data}",
                "--user=root",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        options = [f"--datadir={data}", f"--socket={socket_path}", "--user=root"]
        small = ["--skip-networking", "--innodb-buffer-pool-size=16M"]
        self._start("mariadbd", ["mariadbd", "--no-defaults", *options, *small])
        wait_for(socket_path.exists, "MariaDB's socket")
        # Its plugin connects to the socket that this variable names.
        self.environment["MYSQL_UNIX_PORT"] = str(socket_path)
        self._start("slurmdbd", ["slurmdbd", "-D"])
        added = ("sacctmgr", "--immediate", "add", "cluster", "test")
        wait_for(lambda: "test" in self.run(*added), "the accounting of the cluster")

    def run(self, *command: str, directory: Path | None = None, timeout_s: float = 60.0) -> str:
        """What a command of Slurm prints; empty where it fails."""
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def submit(
        self, script: Path, variables: dict[str, str], *, timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Submit a batch script as a user would, in its own folder, and wait for its end."""
        return subprocess.run(
            ["sbatch", "--wait", "--output", str(self.folder / "out.log"), script.name],
            env={**self.environment, **variables},
            cwd=script.parent,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def output(self) -> str:
        """What the job said, and what the daemons did."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def close(self) -> None:
        """End everything."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
