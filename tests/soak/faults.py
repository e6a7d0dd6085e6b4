"""Faults of a soak. `undo` ends a fault at the end of its time."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testbed.cgroups import frozen
from testbed.waiting import polling
from tests.soak.site import SoakSite, User

_FIND_S = 8.0
_YOUNG_S = 1.0


@dataclass
class TimedFault:
    """Fault that begins after `after_s` and lasts for `for_s`."""

    name: str
    after_s: float
    for_s: float
    begin: Callable[[], str | None]
    """Begins the fault; returns its target for the log."""
    undo: Callable[[], None]


def draw_fault(site: SoakSite, user: User, generator: random.Random) -> TimedFault:
    """Draw one fault at a random time."""
    makers = [_kill, _kill, _kill, _kill_servers, _stop, _store_away, _registry_stopped]
    makers.append(_keep_stopped)
    if site.freezers:
        makers.append(_freeze)
    if site.hdfs:
        makers += [_hdfs_fault, _hdfs_fault]
    if user.uid == 0:
        makers.append(_disk_full)
    after_s, for_s = generator.uniform(0, 4), generator.uniform(0.5, 4)
    return generator.choice(makers)(site, user, generator, after_s, for_s)


def _hit(user: User, generator: random.Random, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a random process of a node; return its id (0 for none) and a name."""
    found = user.node.processes()
    if not found:
        return 0, "no process"
    pid = generator.choice(sorted(found))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return pid, f"{pid} ...{' '.join(found[pid].split())[-60:]}"


def _kill(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    number = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])

    def begin() -> str:
        return _hit(user, generator, number)[1]

    return TimedFault(f"{number.name} for {user.uid}", after_s, for_s, begin, lambda: None)


def _kill_servers(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    """Kill all servers with their supervisors, so that no server is restarted."""

    def begin() -> str:
        servers = _servers(user)
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return str(servers)

    return TimedFault(f"SIGKILL for all servers of {user.uid}", after_s, for_s, begin, lambda: None)


def _servers(user: User) -> list[int]:
    """Return the ids of servers and their supervisors."""
    found = user.node.processes()
    return [pid for pid, line in found.items() if "serve" in line.split(" -c ")[0]]


def _workers(user: User) -> list[int]:
    """Return the ids of servers that have a supervisor and have run for a while.

    Before that, a supervisor allows them much more time.
    """
    servers, workers = _servers(user), []
    for pid in servers:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            is_young = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s < _YOUNG_S
            if int(fields[1]) in servers and not is_young:
                workers.append(pid)
    return workers


def _stop(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    stopped: list[int] = []

    def begin() -> str:
        pid, name = _hit(user, generator, signal.SIGSTOP)
        if pid:
            stopped.append(pid)
        return name

    def undo() -> None:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    return TimedFault(f"SIGSTOP for {user.uid}", after_s, 2 * for_s, begin, undo)


def _keep_stopped(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    """Stop workers again whenever they are continued, while they answer in between."""
    is_over = threading.Event()
    thread: list[threading.Thread] = []

    def keep() -> None:
        workers: list[int] = []
        while not is_over.wait(0.2):
            workers = workers or _workers(user)
            _signal(workers, signal.SIGSTOP)
        print(f"  kept stopped: {workers}", flush=True)

    def begin() -> None:
        thread.append(threading.Thread(target=keep))
        thread[0].start()

    def undo() -> None:
        is_over.set()
        thread[0].join()
        # Only servers get the signal: another process may have a number of an ended worker by now.
        _signal(_servers(user), signal.SIGCONT)

    return TimedFault(f"workers of {user.uid} kept stopped", after_s, 9 + 2 * for_s, begin, undo)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _freeze(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    """Freeze all processes of a node, as `docker pause` does, or only the workers."""
    chosen, is_all = generator.choice(site.freezers), generator.choice([True, False])
    stack = contextlib.ExitStack()

    def begin() -> str:
        find = user.node.processes if is_all else lambda: _workers(user)
        # A job has no servers at its begin.
        for _ in polling(_FIND_S, 0.05):
            if pids := list(find()):
                break
        stack.enter_context(frozen(*pids, freezer=chosen))
        return str(pids)

    who = "all" if is_all else "workers"
    name = f"{who} of {user.uid} frozen by {chosen.top}"
    # Workers for longer than their supervisors allow: they are killed and replaced.
    lasts_s = generator.choice([2, 5]) * for_s if is_all else 9 + 2 * for_s
    return TimedFault(name, after_s, lasts_s, begin, stack.close)


def _hdfs_fault(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    hdfs = site.hdfs
    assert hdfs is not None
    index = generator.randrange(hdfs.datanode_count)
    kinds: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        (
            f"DataNode {index} dead",
            lambda: hdfs.kill_datanode(index),
            lambda: hdfs.start_datanode(index),
        ),
        ("NameNode dead", hdfs.stop_namenode, hdfs.start_namenode),
        ("HDFS stopped", hdfs.pause, hdfs.resume),
    ]
    name, break_it, mend_it = generator.choice(kinds)
    # One fault of HDFS at a time: a stopped JVM does not answer commands.
    held: list[bool] = []

    def begin() -> str:
        held.append(site.hdfs_is_free.acquire(blocking=False))
        if not held[0]:
            return "not now: another fault of HDFS lasts"
        break_it()
        return ""

    def undo() -> None:
        if held[0]:
            mend_it()
            hdfs.wait_for_datanodes(hdfs.datanode_count)
            site.hdfs_is_free.release()

    return TimedFault(name, after_s, generator.choice([1, 4]) * for_s, begin, undo)


def _store_away(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    away = user.store.with_name("store-away")

    def begin() -> str:
        with contextlib.suppress(FileNotFoundError):
            user.store.rename(away)
        return str(user.store)

    def undo() -> None:
        if not away.exists():
            return
        if user.store.exists():
            _merge(user.store, away)
        away.rename(user.store)

    return TimedFault(f"store of {user.uid} away", after_s, for_s, begin, undo)


def _merge(made: Path, away: Path) -> None:
    """Move away the store that was made while the real one was missing: its writers were warned."""
    made.rename(away.with_name(f"store-made-{os.urandom(4).hex()}"))


def _registry_stopped(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    def begin() -> str:
        os.kill(site.registry_pid, signal.SIGSTOP)
        return site.registry.host

    def undo() -> None:
        os.kill(site.registry_pid, signal.SIGCONT)

    return TimedFault("registry stopped", after_s, for_s, begin, undo)


def _disk_full(
    site: SoakSite, user: User, generator: random.Random, after_s: float, for_s: float
) -> TimedFault:
    # The cache's file system is mounted in the user's mount namespace only.
    filler = Path(f"/proc/{user.holder.pid}/root{user.node.base}/cache/filler")

    def begin() -> str:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        return str(user.node.base / "cache")

    def undo() -> None:
        with contextlib.suppress(OSError):
            filler.unlink(missing_ok=True)

    return TimedFault(f"cache of {user.uid} full", after_s, 2 * for_s, begin, undo)
