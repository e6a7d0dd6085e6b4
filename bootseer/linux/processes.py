"""Notes in a folder of which processes of this node use something.

Alone owns their names: `PID-STARTED`, which names one process for ever; whether it lives, only the
kernel says. Stateless; any thread, and every process of the node.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bootseer.linux.private_files import private_directory


def start_time(pid: int) -> str:
    """Of a process, in ticks since the boot: with its id it names the process for ever. "" if it
    has ended."""
    fields = _status(pid)
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


def own_line() -> set[int]:
    """This process and those that it descends from, as far as this PID namespace shows."""
    found = set()
    pid = os.getpid()
    while pid and pid not in found and (fields := _status(pid)):
        found.add(pid)
        pid = int(fields[1])
    return found


def _status(pid: int) -> list[str]:
    """Of a process, what proc_pid_stat(5) has from the state on; nothing where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the program's name in parentheses, with anything in it.
    return text.rpartition(")")[2].split()


def write_note(folder: Path, name: str) -> None:
    """Make an empty file of this name in the folder, which is made if need be.

    Raises: BootseerError, OSError.
    """
    path = private_directory(folder) / name
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def note_process(folder: Path, pid: int) -> None:
    """Note process `pid` in the folder. Raises: BootseerError, OSError."""
    write_note(folder, f"{pid}-{start_time(pid)}")


def notes(folder: Path) -> list[str]:
    """The names in the folder; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def living_processes(folder: Path) -> Iterator[int]:
    """The processes noted in the folder that live."""
    for name in notes(folder):
        pid, _, started = name.partition("-")
        if pid.isdigit() and started and start_time(int(pid)) == started:
            yield int(pid)
