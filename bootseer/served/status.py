"""State of all services of this node, for `bootseer status`.

`status_entry` returns what a service serves, where and for whom, its health, and advice. Nothing
here touches a mount, which could hang. Any thread.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.errors import BootseerError
from bootseer.linux import mount_table
from bootseer.served.overlays import overlays
from bootseer.served.service import (
    ATTENDING,
    CHECKPOINT,
    PRELOAD,
    PUBLISH,
    RUN,
    VOLUME,
    WARMING,
    Service,
    ServiceState,
    log_path,
)
from bootseer.served.users import works_without_server

_KINDS = {
    "mount": "image",
    RUN: "container",
    "environment": "environment",
    "containerd": "containerd image",
    "link": "linked tree",
    CHECKPOINT: "checkpoints",
    PRELOAD: "preloader",
    PUBLISH: "publisher",
    ATTENDING: "attendant",
    VOLUME: "volume",
    WARMING: "warming",
}
IMAGES = frozenset(("image", "container", "environment", "containerd image", "volume"))
"""Kinds that are trees served like images."""
_SHOWN_AT_DIRECTORY = ("image", "containerd image", "checkpoints", "volume", "warming")
_ANSWER_S = 2.0
_RECENT_S = 600.0


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


def kind_of(state: ServiceState) -> str:
    """Return the kind of a service, for people. Pure."""
    kind = _KINDS.get(state.purpose, state.purpose)
    return "own view" if kind == "linked tree" and not state.index_digest else kind


def status_entry(service: Service, run_dir: Path) -> StatusEntry:
    """Return the row for a service. Asks its server, for two seconds at most."""
    state = service.state
    kind = kind_of(state)
    shown = tuple(str(overlay.path) for overlay in overlays() if overlay.id == state.id)
    if not shown and kind in _SHOWN_AT_DIRECTORY:
        shown = (state.directory,)
    if kind == "container" and mount_table.find_mount(Path(state.directory)) is not None:
        shown = (state.directory,)  # a lingering container's tree is mounted on the host
    log = log_path(run_dir, state.id)
    health, problem, remedy, figures = _health(service, kind, log)
    return StatusEntry(
        kind=kind,
        what=state.reference.removeprefix("snapshot") if kind == "environment" else state.reference,
        where=shown,
        since_s=state.started_ns / 1e9,
        pid=state.pid or None,
        worker_pid=state.worker_pid or None,
        users=tuple(sorted(service.users())),
        health=health,
        problem=problem,
        remedy=remedy,
        log=str(log) if log.exists() else None,
        until_s=state.until_ns / 1e9 if state.until_ns else None,
        figures=figures,
    )


def _health(service: Service, kind: str, log: Path) -> tuple[str, str, str, dict[str, Any] | None]:
    state, directory = service.state, service.state.directory
    is_alive = service.is_alive
    remedy = {
        "image": f"`bootseer unmount {directory}` removes it",
        "checkpoints": f"`bootseer unmount {directory}` removes it; mount it again",
        "preloader": "workers start ordinarily",
        "publisher": "a later start publishes again",
        "volume": "the CSI driver mounts it anew",
    }.get(kind, "the next start on this node removes it")
    if not is_alive and works_without_server(service.folder):
        what = "the process that would remove it was killed"
        return "degraded", what, "the next start after the end of its users removes it", None
    if state.purpose == PRELOAD and not state.pid:
        return "ok", "", "", None  # the job's imports are recorded, and none was preloaded
    if not is_alive:
        return "dead", "its server was killed", remedy, None
    if state.problem:
        return "degraded", state.problem, f"see {log}", None
    if kind not in IMAGES and kind != "checkpoints":
        return "ok", "", "", None
    try:
        answer = service.ask("status", _ANSWER_S)
    except BootseerError as error:
        return "silent", str(error), f"see {log}; {remedy}", None
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


def foreign_entries(known: Iterable[Service], run_dir: Path) -> Iterator[StatusEntry]:
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
