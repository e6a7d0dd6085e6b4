"""CPU time and memory of processes, and commands that cannot hang a benchmark.

Owns reading CPU time from /proc, running a command with a deadline, and serving a FUSE mount for
the length of a block.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.needs import MissingError
from testbed.paths import REPOSITORY
from testbed.waiting import polling

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOUNT_DEADLINE_S = 15.0


def process_tree(pid: int) -> list[int]:
    """Return `pid` and the ids of all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, ()))
    return found


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of `pid`, its living descendants, and the dead ones they waited for.

    Granularity: one clock tick, usually 10 ms.
    """
    total_ticks = 0
    for member in process_tree(pid):
        fields = _stat_fields(member)
        if fields:
            # utime, stime, cutime, cstime: fields 14 to 17 of proc_pid_stat(5).
            total_ticks += sum(int(value) for value in fields[11:15])
    return total_ticks / _TICKS_PER_S


def tree_peak_bytes(pid: int) -> int:
    """Return the sum of the peak resident sizes of `pid` and its living descendants.

    The peaks need not have been at the same time.
    """
    total_kib = 0
    for member in process_tree(pid):
        try:
            lines = Path(f"/proc/{member}/status").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total_kib * 1024


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, or [] if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the command in parentheses and may contain anything.
    return text.rpartition(")")[2].split()


def uninterruptible_threads() -> str:
    """Return the threads of this machine in uninterruptible sleep; "" if there are none.

    For each thread: its command line, and its kernel stack (for root) or the kernel function in
    which it waits.
    """
    found = []
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # one that ends meanwhile, or of another user
            if _stat_fields(int(task.name))[:1] != ["D"]:
                continue
            # Empty for a thread of the kernel itself.
            if command := (task / "cmdline").read_bytes().replace(b"\0", b" "):
                stack = task / ("stack" if os.geteuid() == 0 else "wchan")
                found.append(f"{task}: {os.fsdecode(command)}\n{stack.read_text()}")
    return "\n".join(found)


def run_json(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> Any:
    """Run `command` in the checkout's root and return the JSON document that it prints.

    Raises: RuntimeError with the end of its stderr if it fails or takes longer than `timeout_s`.
    """
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A reader stuck in FUSE dies only when its mount is aborted, which the session does next.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        raise RuntimeError(f"{Path(command[0]).name} did not end within {timeout_s:g} s") from None
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({process.returncode}): {err[-2000:]}")
    return json.loads(out)


@dataclass(frozen=True, slots=True)
class FuseProcess:
    """Process that serves a FUSE mount."""

    pid: int
    mountpoint: Path


@contextlib.contextmanager
def mounted(command: Sequence[str], mountpoint: Path, log: Path) -> Iterator[FuseProcess]:
    """Run a FUSE server in the foreground until the block ends.

    Raises: MissingError with the last line of its log if it does not mount.
    """
    mountpoint.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=sink, stderr=sink, start_new_session=True
        )
    connection: int | None = None
    try:
        for _ in polling(_MOUNT_DEADLINE_S):
            # The number 0 is valid, too.
            connection = fuse_connection(mountpoint)
            if connection is not None or process.poll() is not None:
                break
        if connection is None:
            raise MissingError(f"{Path(command[0]).name} did not mount: {_last_words(log)}")
        yield FuseProcess(process.pid, mountpoint)
    finally:
        _unmount(mountpoint, connection)
        _end(process)


def fuse_connection(mountpoint: Path) -> int | None:
    """Return the number of the FUSE mount at `mountpoint` under /sys/fs/fuse/connections, or None.

    The number is read from the mount table, since a stat of the mount hangs when its server hangs.
    """
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if fields[4] == str(mountpoint.absolute()) and after.startswith("fuse"):
            return int(fields[2].partition(":")[2])
    return None


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _unmount(mountpoint: Path, connection: int | None) -> None:
    """Detach the mount and abort its connection, so that no reader waits for a reply."""
    for command in (["umount", "-l"], ["fusermount3", "-uz"]):
        if fuse_connection(mountpoint) is not None and shutil.which(command[0]):
            subprocess.run(
                [*command, str(mountpoint)], capture_output=True, timeout=20, check=False
            )
    if connection is not None:
        abort = Path(f"/sys/fs/fuse/connections/{connection}/abort")
        with contextlib.suppress(OSError):
            abort.write_text("1")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process.wait(timeout=3)
            return
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Return `command` with a prefix that kills it when the calling thread ends."""
    return ["setpriv", "--pdeathsig", "KILL", *command]


def python_command(*arguments: str) -> list[str]:
    """Return a command line for the running interpreter."""
    return [sys.executable, *arguments]
