"""What is served on this node, and whether it is well: what `bootseer status` shows.

`known_servers` is what every view of it begins with; `entry_of` says of one what it serves, where,
for whom, what is wrong and what to do. Nothing here touches what is mounted: that could hang. Any
thread.
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
from bootseer.linux.processes import living_ids
from bootseer.served.control import ask
from bootseer.served.cover_users import serves_itself
from bootseer.served.covers import Cover, covers
from bootseer.served.folders import (
    ATTENDING,
    CHECKPOINT,
    PUBLISH,
    RUN,
    VOLUME,
    MountState,
    is_alive,
    log_path,
    mounts_dir,
    read_state,
    starts_dir,
)

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
# By what the names of their logs begin with.
_UNSERVING = {"preload": "preloader"}
IMAGES = frozenset(("image", "container", "environment", "containerd image", "volume"))
"""Kinds whose trees are served as images are."""
_ANSWER_S = 2.0
_RECENT_S = 600.0


class Known(Struct, frozen=True):
    """A server that has a folder, alive or not."""

    state: MountState
    folder: Path
    is_running: bool

    @property
    def kind(self) -> str:
        """For people."""
        kind = _KINDS.get(self.state.purpose, self.state.purpose)
        if kind == "linked tree" and not self.state.index_digest:
            return "own view"
        return kind

    def ask(self, command: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """The server's answer. Raises: UnavailableError, DeadlineError."""
        return ask(self.folder, command, timeout_s=timeout_s)


class Entry(Struct, frozen=True):
    """One thing that is mounted, or runs in the background: a row of `bootseer status`."""

    kind: str
    what: str
    """An image's name, a storage's URL, a directory."""
    where: tuple[str, ...]
    """Where it is seen in this mount namespace."""
    since_s: float | None
    """Since 1970."""
    pid: int | None
    """The process id of its server; of the supervisor, where there is one."""
    worker_pid: int | None
    users: tuple[int, ...]
    """Processes for which it is kept."""
    health: str
    """"ok", "degraded" (it works, but), "silent" (its server does not answer), "dead", or "unknown"
    (another user's)."""
    problem: str = ""
    remedy: str = ""
    """What to do."""
    log: str | None = None
    until_s: float | None = None
    """Since 1970: when it goes by itself, where that is known."""
    figures: dict[str, Any] | None = None
    """What its server says of it; docs/json.md has the keys."""


def known_servers(run_dir: Path) -> list[Known]:
    """All servers with a folder below `run_dir`, and publishers, the oldest first."""
    found = []
    for parent in (mounts_dir(run_dir), starts_dir(run_dir), run_dir / "publishing"):
        with contextlib.suppress(FileNotFoundError):
            for folder in parent.iterdir():
                state = read_state(folder)
                if state is not None:
                    found.append(Known(state, folder, is_alive(folder)))
    return sorted(found, key=lambda one: one.state.started_ns)


def unserving(run_dir: Path) -> Iterator[Entry]:
    """Yield the processes of ours that live, serve nothing and have no folder, as their logs show
    them."""
    with contextlib.suppress(OSError):
        for log in sorted((run_dir / "logs").glob("*.log")):
            purpose, _, name = log.stem.partition("-")
            with contextlib.suppress(OSError):
                if purpose in _UNSERVING and is_own(log.lstat()) and is_written(log):
                    yield Entry(
                        kind=_UNSERVING[purpose],
                        what=name,
                        where=(),
                        since_s=None,
                        pid=None,
                        worker_pid=None,
                        users=(),
                        health="ok",
                        log=str(log),
                    )


def known_mounts(run_dir: Path) -> list[Known]:
    """The servers of checkpoint folders, the oldest first."""
    return [one for one in known_servers(run_dir) if one.state.purpose == CHECKPOINT]


def find_known(run_dir: Path, directory: Path) -> Known | None:
    """The checkpoint folder that is, or was last, mounted on `directory` (absolute)."""
    found = [one for one in known_mounts(run_dir) if one.state.directory == str(directory)]
    return max(found, key=lambda one: (one.is_running, one.state.started_ns), default=None)


def entry_of(known: Known, run_dir: Path) -> Entry:
    """What is to be said of one. Asks its server, for two seconds at most."""
    state, kind = known.state, known.kind
    shown = tuple(str(cover.path) for cover in covers() if cover.id == state.id)
    if not shown and kind in ("image", "containerd image", "checkpoints", "volume"):
        shown = (state.directory,)
    if kind == "container" and mount_table.find_mount(Path(state.directory)) is not None:
        shown = (state.directory,)  # it lingers
    log = log_path(run_dir, state.id)
    health, problem, remedy, figures = _health(known, kind, log)
    users = living_ids(known.folder / "users")
    if state.user is not None and state.user.lives():
        users.add(state.user.pid)
    return Entry(
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


def _health(known: Known, kind: str, log: Path) -> tuple[str, str, str, dict[str, Any] | None]:
    state, directory = known.state, known.state.directory
    ends = {
        "image": f"`bootseer unmount {directory}` removes it",
        "checkpoints": f"`bootseer unmount {directory}` removes it; mount it again",
        "publisher": "a later start publishes again",
        "volume": "the CSI driver mounts it anew",
    }.get(kind, "the next start on this node removes it")
    if not known.is_running and serves_itself(known.folder):
        what = "the process that would remove it was killed"
        return "degraded", what, "the next start after its users' end removes it", None
    if not known.is_running:
        return "dead", "its server was killed", ends, None
    if kind not in IMAGES and kind != "checkpoints":
        return "ok", "", "", None
    try:
        answer = known.ask("status", _ANSWER_S)
    except BootseerError as error:
        return "silent", str(error), f"see {log}; {ends}", None
    # Where not even the worker is known, they are in a PID namespace that we do not see.
    server, worker = state.processes
    if worker.lives() and not server.lives():
        what = "the process that would replace a worker that dies is gone"
        return "degraded", what, "mount it again when nothing uses it", answer
    problem = _problem_of(answer, kind)
    if problem:
        return "degraded", problem, f"see {log}", answer
    if kind in ("image", "checkpoints") and mount_table.find_mount(Path(directory)) is None:
        what = "it was taken off while files in it were open"
        return "degraded", what, "it ends when they are closed", answer
    return "ok", "", "", answer


def _problem_of(answer: Mapping[str, Any], kind: str) -> str:
    """What a server's own figures show. Pure, but for the clock."""
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
        return "the node's cache is full: what is read is fetched again each time"
    prefetch = answer.get("prefetch")
    return f"its bundle was given up: {prefetch['error']}" if prefetch and prefetch["error"] else ""


def foreign_entries(known: Iterable[Known], run_dir: Path) -> Iterator[Entry]:
    """What is mounted here by servers of which this `run_dir` knows nothing: other users', other
    containers', or dead ones whose folder is gone."""
    servers = list(known)
    directories = {one.state.directory for one in servers}
    for mount in mount_table.find_mounts("bootseer"):
        if str(mount.path) not in directories:
            kind = "checkpoints" if mount.subtype.endswith("-stripe") else "image"
            yield _foreign(kind, mount.name, mount.path, mount.user, run_dir)
    ids = {one.state.id for one in servers}
    for cover in covers():
        if cover.id not in ids:
            yield _foreign(*_of_cover(cover), run_dir)


def _of_cover(cover: Cover) -> tuple[str, str, Path, int]:
    return "environment", str(cover.path), cover.path, 0


def _foreign(kind: str, what: str, path: Path, user: int, run_dir: Path) -> Entry:
    whose = "another folder's" if user == os.geteuid() else f"user {user}'s"
    return Entry(
        kind=kind,
        what=what,
        where=(str(path),),
        since_s=None,
        pid=None,
        worker_pid=None,
        users=(),
        health="unknown",
        problem=f"no server with its state in {run_dir} serves it: it is {whose}, or left over",
        remedy=f"give its --run-dir; if it does not answer, `bootseer unmount {path}`",
    )
