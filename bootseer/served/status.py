"""State of all servers on this node, for `bootseer status`.

`known_servers` lists the servers that have a folder; `status_entry` returns what one serves, where
and for whom, its health, and advice. Nothing here touches a mount, which could hang. Any thread.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.errors import BootseerError
from bootseer.linux import mount_table
from bootseer.linux.locks import is_written
from bootseer.linux.private_files import is_own
from bootseer.linux.processes import living_pids
from bootseer.served.control import ask
from bootseer.served.overlays import overlays
from bootseer.served.service import (
    ATTENDING,
    CHECKPOINT,
    PUBLISH,
    RUN,
    VOLUME,
    ServiceState,
    is_alive,
    log_path,
    read_state,
    services_dir,
)
from bootseer.served.users import works_without_server

_KINDS = {
    "mount": "image",
    RUN: "container",
    "environment": "environment",
    "containerd": "containerd image",
    "link": "linked tree",
    CHECKPOINT: "checkpoints",
    PUBLISH: "publisher",
    ATTENDING: "attendant",
    VOLUME: "volume",
}
# Kinds of processes without a folder, by the prefix of their logs' names.
_BACKGROUND = {"preload": "preloader"}
IMAGES = frozenset(("image", "container", "environment", "containerd image", "volume"))
"""Kinds that are trees served like images."""
_ANSWER_S = 2.0
_RECENT_S = 600.0


class KnownServer(Struct, frozen=True):
    """A server with a folder, alive or dead."""

    state: ServiceState
    folder: Path
    is_running: bool

    @property
    def kind(self) -> str:
        """Kind of the mount, for people."""
        kind = _KINDS.get(self.state.purpose, self.state.purpose)
        if kind == "linked tree" and not self.state.index_digest:
            return "own view"
        return kind

    def ask(self, command: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return the server's answer to a command. Raises: UnavailableError, DeadlineError."""
        return ask(self.folder, command, timeout_s=timeout_s)


class StatusEntry(Struct, frozen=True):
    """A row of `bootseer status`: a mount or a background process."""

    kind: str
    what: str
    """Name of an image, URL of a storage, or a directory."""
    where: tuple[str, ...]
    """Paths in this mount namespace at which it is mounted."""
    since_s: float | None
    """Begin, in seconds since 1970."""
    pid: int | None
    """Process id of the server; of the supervisor, if there is one."""
    worker_pid: int | None
    users: tuple[int, ...]
    """Processes that use it."""
    health: str
    """"ok", "degraded" (has a problem), "silent", "dead", or "unknown" (another user's)."""
    problem: str = ""
    remedy: str = ""
    """Advice about the problem."""
    log: str | None = None
    until_s: float | None = None
    """Time when it will end by itself, in seconds since 1970, if that is known."""
    figures: dict[str, Any] | None = None
    """The server's own status; docs/json.md has the keys."""


def known_servers(run_dir: Path) -> list[KnownServer]:
    """Return all servers, attendants and publishers with a folder, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in services_dir(run_dir).iterdir():
            state = read_state(folder)
            if state is not None:
                found.append(KnownServer(state, folder, is_alive(folder)))
    return sorted(found, key=lambda one: one.state.started_ns)


def background_entries(run_dir: Path) -> Iterator[StatusEntry]:
    """Yield the living processes that serve nothing and have no folder, found by their logs."""
    with contextlib.suppress(OSError):
        for log in sorted((run_dir / "logs").glob("*.log")):
            purpose, _, name = log.stem.partition("-")
            with contextlib.suppress(OSError):
                if purpose in _BACKGROUND and is_own(log.lstat()) and is_written(log):
                    yield StatusEntry(
                        kind=_BACKGROUND[purpose],
                        what=name,
                        where=(),
                        since_s=None,
                        pid=None,
                        worker_pid=None,
                        users=(),
                        health="ok",
                        log=str(log),
                    )


def known_mounts(run_dir: Path) -> list[KnownServer]:
    """Return the servers of checkpoint folders, the oldest first."""
    return [one for one in known_servers(run_dir) if one.state.purpose == CHECKPOINT]


def find_known(run_dir: Path, directory: Path) -> KnownServer | None:
    """Return the server of the checkpoint folder last mounted on `directory` (absolute)."""
    found = [one for one in known_mounts(run_dir) if one.state.directory == str(directory)]
    return max(found, key=lambda one: (one.is_running, one.state.started_ns), default=None)


def status_entry(known: KnownServer, run_dir: Path) -> StatusEntry:
    """Return the row for a server. Asks the server, for two seconds at most."""
    state, kind = known.state, known.kind
    shown = tuple(str(overlay.path) for overlay in overlays() if overlay.id == state.id)
    if not shown and kind in ("image", "containerd image", "checkpoints", "volume"):
        shown = (state.directory,)
    if kind == "container" and mount_table.find_mount(Path(state.directory)) is not None:
        shown = (state.directory,)  # a lingering container's tree is mounted on the host
    log = log_path(run_dir, state.id)
    health, problem, remedy, figures = _health(known, kind, log)
    users = living_pids(known.folder / "users")
    if state.user is not None and state.user.lives():
        users.add(state.user.pid)
    return StatusEntry(
        kind=kind,
        what=state.reference.removeprefix("snapshot") if kind == "environment" else state.reference,
        where=shown,
        since_s=state.started_ns / 1e9,
        pid=state.pid or None,
        worker_pid=state.worker_pid or None,
        users=tuple(sorted(users)),
        health=health,
        problem=problem,
        remedy=remedy,
        log=str(log) if log.exists() else None,
        until_s=state.until_ns / 1e9 if state.until_ns else None,
        figures=figures,
    )


def _health(
    known: KnownServer, kind: str, log: Path
) -> tuple[str, str, str, dict[str, Any] | None]:
    state, directory = known.state, known.state.directory
    ends = {
        "image": f"`bootseer unmount {directory}` removes it",
        "checkpoints": f"`bootseer unmount {directory}` removes it; mount it again",
        "publisher": "a later start publishes again",
        "volume": "the CSI driver mounts it anew",
    }.get(kind, "the next start on this node removes it")
    if not known.is_running and works_without_server(known.folder):
        what = "the process that would remove it was killed"
        return "degraded", what, "the next start after the end of its users removes it", None
    if not known.is_running:
        return "dead", "its server was killed", ends, None
    if kind not in IMAGES and kind != "checkpoints":
        return "ok", "", "", None
    try:
        answer = known.ask("status", _ANSWER_S)
    except BootseerError as error:
        return "silent", str(error), f"see {log}; {ends}", None
    # If neither process is visible, both are in a PID namespace that is hidden from this process.
    server, worker = state.processes
    if worker.lives() and not server.lives():
        what = "its supervisor has ended: a worker that dies is not replaced"
        return "degraded", what, "mount it again when nothing uses it", answer
    problem = _problem_of(answer, kind)
    if problem:
        return "degraded", problem, f"see {log}", answer
    if kind in ("image", "checkpoints") and mount_table.find_mount(Path(directory)) is None:
        what = "it was unmounted while files in it were open"
        return "degraded", what, "it ends when they are closed", answer
    return "ok", "", "", answer


def _problem_of(answer: Mapping[str, Any], kind: str) -> str:
    """Return the problem that a server's own status shows; empty for none."""
    if kind == "checkpoints":
        errors = [
            one["message"]
            for one in answer.get("errors", ())
            if time.time() - one["time_s"] < _RECENT_S
        ]
        return errors[-1] if errors else ""
    if count := answer["faults"]["failed_count"]:
        return f"{count} reads failed"
    if answer.get("cache_is_full"):
        return "the node's cache is full: each read fetches its bytes again"
    prefetch = answer.get("prefetch")
    return f"its bundle has failed: {prefetch['error']}" if prefetch and prefetch["error"] else ""


def foreign_entries(known: Iterable[KnownServer], run_dir: Path) -> Iterator[StatusEntry]:
    """Yield the mounts here whose servers have no folder in this `run_dir`."""
    servers = list(known)
    directories = {one.state.directory for one in servers}
    for mount in mount_table.find_mounts("bootseer"):
        if str(mount.path) not in directories:
            kind = "checkpoints" if mount.subtype.endswith("-stripe") else "image"
            yield _foreign(kind, mount.name, mount.path, mount.user, run_dir)
    ids = {one.state.id for one in servers}
    for overlay in overlays():
        if overlay.id not in ids:
            yield _foreign("environment", str(overlay.path), overlay.path, 0, run_dir)


def _foreign(kind: str, what: str, path: Path, user: int, run_dir: Path) -> StatusEntry:
    whose = "another folder's" if user == os.geteuid() else f"user {user}'s"
    return StatusEntry(
        kind=kind,
        what=what,
        where=(str(path),),
        since_s=None,
        pid=None,
        worker_pid=None,
        users=(),
        health="unknown",
        problem=f"its server has no state in {run_dir}: it is {whose}, or a killed server left it",
        remedy=f"give its --run-dir; if it does not answer, `bootseer unmount {path}`",
    )
