"""What goes wrong in a soak. A fault ends by itself: `undo` is called when its time is over."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.site import Site, User


@dataclass
class Fault:
    """It begins after `after_s` and lasts for `for_s`."""

    name: str
    after_s: float
    for_s: float
    begin: Callable[[], str]
    """Returns what was hit, for the log."""
    undo: Callable[[], None]


def draw_fault(site: Site, user: User, generator: random.Random) -> Fault:
    """One of the faults, at a random moment of the jobs that run."""
    makers = [_kill, _kill, _kill, _kill_servers, _stop, _store_away, _registry_stopped]
    if user.uid == 0:
        makers.append(_disk_full)
    after_s, for_s = generator.uniform(0, 4), generator.uniform(0.5, 4)
    return generator.choice(makers)(site, user, generator, after_s, for_s)


def _hit(user: User, generator: random.Random, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to one of the processes of a node; which one, 0 for none, and its name."""
    found = user.node.processes()
    if not found:
        return 0, "nobody"
    pid = generator.choice(sorted(found))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return pid, f"{pid} ...{' '.join(found[pid].split())[-60:]}"


def _kill(site: Site, user: User, generator: random.Random, after_s: float, for_s: float) -> Fault:
    number = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])

    def begin() -> str:
        return _hit(user, generator, number)[1]

    return Fault(f"{number.name} for {user.uid}", after_s, for_s, begin, lambda: None)


def _kill_servers(
    site: Site, user: User, generator: random.Random, after_s: float, for_s: float
) -> Fault:
    """Each server with its supervisor, so that nobody is left to start another one."""

    def begin() -> str:
        found = user.node.processes()
        servers = [pid for pid, line in found.items() if "serve" in line.split(" -c ")[0]]
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return str(servers)

    return Fault(f"SIGKILL for all servers of {user.uid}", after_s, for_s, begin, lambda: None)


def _stop(site: Site, user: User, generator: random.Random, after_s: float, for_s: float) -> Fault:
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

    return Fault(f"SIGSTOP for {user.uid}", after_s, 2 * for_s, begin, undo)


def _store_away(
    site: Site, user: User, generator: random.Random, after_s: float, for_s: float
) -> Fault:
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

    return Fault(f"store of {user.uid} away", after_s, for_s, begin, undo)


def _merge(made: Path, away: Path) -> None:
    """What was stored where the store was missing gives way: its writer was told of a new store."""
    made.rename(away.with_name(f"store-made-{os.urandom(4).hex()}"))


def _registry_stopped(
    site: Site, user: User, generator: random.Random, after_s: float, for_s: float
) -> Fault:
    def begin() -> str:
        os.kill(site.registry_pid, signal.SIGSTOP)
        return site.registry.host

    def undo() -> None:
        os.kill(site.registry_pid, signal.SIGCONT)

    return Fault("registry stopped", after_s, for_s, begin, undo)


def _disk_full(
    site: Site, user: User, generator: random.Random, after_s: float, for_s: float
) -> Fault:
    # The cache's file system is mounted in the user's namespace only.
    filler = Path(f"/proc/{user.holder.pid}/root{user.node.base}/cache/filler")

    def begin() -> str:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        return str(user.node.base / "cache")

    def undo() -> None:
        with contextlib.suppress(OSError):
            filler.unlink(missing_ok=True)

    return Fault(f"cache of {user.uid} full", after_s, 2 * for_s, begin, undo)
