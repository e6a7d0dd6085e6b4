"""Remains of jobs, found in the kernel's lists of processes and mounts."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from testbed.waiting import polling
from tests.soak.jobs import MOUNT_PREFIX
from tests.soak.site import SoakSite, User

SETTLE_S = 120.0
"""Time limit for servers to end after their jobs, and for publishers to store everything."""
_COMMAND_S = 120.0
_IN_USE = ("run/services/*", "cache/containers/*", "cache/streams/new-*")
_DAYS_S = 3 * 86400
"""Age at which abandoned files are collected, with a margin for the soak's length."""


def settle(user: User) -> list[str]:
    """Wait until no process or mount of this user's jobs is left; return findings.

    Like an operator, it unmounts images of killed jobs and mounts whose servers were killed
    together with their supervisors.
    """
    findings = []
    for point in user.mounts():
        if Path(point).name.startswith(MOUNT_PREFIX):
            findings += _unmounted(user, point)
    for _ in polling(SETTLE_S, 0.1):
        left = _alive(user)
        if not left:
            break
        dead = [] if user.node.processes() else user.mounts()
        for point in reversed(dead):
            findings += _unmounted(user, point)
    if left:
        findings.append(f"LEFT: {left} {user.node._waiting()}")
        user.node.sweep()
    return findings


def _alive(user: User) -> list[str]:
    processes = [f"{pid} {line[:120]}" for pid, line in user.node.processes().items()]
    return processes + [f"mount {point}" for point in user.mounts()]


def _unmounted(user: User, point: str) -> list[str]:
    """Unmount a dead mount by the documented command; return findings."""
    said = []
    done = run(user, "unmount", point)
    said.append(f"unmount: {done.returncode} {done.stderr.strip()[-150:]}")
    if point not in user.mounts():
        return []
    user.node.sweep()
    subprocess.run(user.command("umount", "-l", point), check=False, timeout=30)
    return [f"LEFT: no command takes off the dead mount {point}: {said}"]


def run(user: User, *words: object) -> "subprocess.CompletedProcess[str]":
    """Run a command of Bootseer as this user."""
    try:
        return subprocess.run(
            user.bootseer(*words),
            env=user.node.environment,
            capture_output=True, text=True, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], -1, "", f"HANGS: {words}")


def final_findings(site: SoakSite) -> list[str]:
    """Return findings on remains of the soak, after a collection of each user's store."""
    findings = [finding for user in site.users for finding in _final(user)]
    for user in site.users:
        for url in site.checkpoint_urls(user):
            path = Path(url.removeprefix("file://"))
            if url in user.saved or path.exists():
                findings += _left_of_checkpoints(user, url)
    return findings


def _left_of_checkpoints(user: User, url: str) -> list[str]:
    """Return damage of checkpoints, and garbage in a folder, whose files can be made old."""
    findings = []
    verified = run(user, "checkpoint", "verify", url)
    if verified.returncode:
        findings.append(f"WRONG BYTES: checkpoint verify {url}: {verified.stdout[-500:]}")
    options: tuple[str, ...] = ()
    if url.startswith("file://"):
        _make_old(Path(url.removeprefix("file://")))
        options = ("--delete", "--age", "1h", "--grace", "0")
    checked = run(user, "checkpoint", "fsck", url, *options)
    said = f"checkpoint fsck {url}: {checked.stdout[-500:]} {checked.stderr[-300:]}"
    if checked.returncode:
        return [*findings, f"WRONG BYTES: {said}"]
    left = run(user, "checkpoint", "fsck", url)
    if options and " 0 pieces" not in left.stderr:
        findings.append(f"LEFT: {said} {left.stderr}")
    return findings


def _make_old(folder: Path) -> None:
    for path in folder.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime - _DAYS_S, status.st_mtime - _DAYS_S))


def _served(user: User) -> list[dict[str, Any]]:
    rows = json.loads(run(user, "status", "--json").stdout)["served"]
    # The files of a killed attendant are left to the next start.
    dead = [row for row in rows if row["health"] == "dead" and row["kind"] != "attendant"]
    return [row for row in rows if row["figures"] is not None or row in dead]


def _final(user: User) -> list[str]:
    findings = settle(user)
    # Servers that are still listed have died with their supervisors: their rows name the command.
    for row in _served(user):
        for where in row["where"]:
            run(user, "unmount", where)
    if left := _served(user):
        findings.append(f"LEFT: status says {str(left)[:300]}")
    verified = run(user, "image", "cache", "--verify")
    if verified.returncode:
        findings.append(f"WRONG BYTES: in the cache: {verified.stdout[-300:]} {verified.stderr}")
    if not user.store.exists():
        return findings
    for name in _snapshots(user):
        checked = run(user, "snapshot", "verify", name)
        if checked.returncode:
            findings.append(f"WRONG BYTES: snapshot verify {name}: {checked.stderr[-300:]}")
    findings += _left_in_store(user)
    for pattern in _IN_USE:
        # The cache may be a file system of the user's mount namespace.
        node = Path(f"/proc/{user.holder.pid}/root{user.node.base}")
        findings += [f"LEFT: {path.relative_to(node)}" for path in node.glob(pattern)]
    return findings


def _left_in_store(user: User) -> list[str]:
    """Return the old leases and temporary files that a collection leaves."""
    _make_old(user.store)
    collected = run(user, "gc", "--delete")
    if collected.returncode:
        return [f"LEFT: gc: {collected.stderr[-300:]}"]
    return [
        f"LEFT: {path.relative_to(user.store)}"
        for path in user.store.rglob("*")
        if path.is_file()
        and path.relative_to(user.store).parts[0] in (".tmp", "leases")
        # A lease holds its own expiry.
        and not (path.parent != user.store / ".tmp" and _is_held(path))
    ]


def _is_held(lease: Path) -> bool:
    return bool(json.loads(lease.read_text())["expires_at_ns"] > time.time_ns())


def _snapshots(user: User) -> list[str]:
    return [path.stem for path in user.store.glob("snapshots/*.json")]
