"""What is mounted on this node: one folder per mount under `run_dir/mounts`, while it lives.

Alone owns that folder's layout: `state.json` (who, what, where), `control` (the server's socket),
and `lock`, held for as long as the server lives. A folder whose lock is free belongs to a server
that died: `sweep` takes it away, and what it left mounted. Edge module; any thread.
"""

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.base.structs import asdict
from bootseer.errors import BootseerError
from bootseer.fuse.kernel.mounting import mounts
from bootseer.linux import namespaces
from bootseer.linux.private_files import is_own, private_directory, private_opener
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.mounts.covers import covers, uncover_all
from bootseer.prefetch.mounts.server_process import new_identity
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

_LOGS_KEPT = 20
_STATE_BYTES_MAX = 1 << 20
# Looking whether somebody holds a lock takes as long as one system call.
_LOOK_S = 0.01
_LOOK_MAX_S = 2.0


class MountState(Struct, frozen=True):
    """One mount, as `state.json` has it."""

    id: str
    reference: str
    index_digest: str
    workload: str
    directory: str
    """Where the image's tree is mounted."""
    pid: int
    """Of the server; the supervisor, where there is one."""
    started_ns: int
    purpose: str
    """"mount" or "run"."""
    scratch: str = ""
    """A folder of the run's own, removed with it."""


def mounts_dir(settings: Settings) -> Path:
    """Where the mounts' folders are."""
    return settings.run_dir / "mounts"


def new_mount_dir(settings: Settings, identity: str | None = None) -> Path:
    """A new folder for a mount; its name is the mount's identity, by default a new one."""
    return private_directory(mounts_dir(settings) / (identity or new_identity()))


def take_lock(directory: Path, *, create: bool = True) -> int:
    """The lock of a folder, as a descriptor that holds it until closed in every process.

    Raises: BlockingIOError when another process has it; OSError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    fd = os.open(directory / "lock", flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def lock_new(directory: Path) -> int:
    """The lock of a folder that nobody else may hold, as `take_lock`; who looks whether somebody
    does (`is_alive`) holds it for a moment. Raises: OSError."""
    end_s = time.monotonic() + _LOOK_MAX_S
    while True:
        try:
            return take_lock(directory)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_LOOK_S)


def is_alive(directory: Path) -> bool:
    """Whether somebody holds the folder's lock."""
    try:
        # Without making one: its holder may be removing the folder this moment.
        os.close(take_lock(directory, create=False))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def wait_released(directory: Path, timeout_s: float) -> bool:
    """Wait until the folder's holder is gone; False when it is not in time."""
    deadline_s = time.monotonic() + timeout_s
    while directory.exists() and is_alive(directory):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def write_state(directory: Path, state: MountState) -> None:
    """Atomically. Raises: OSError."""
    temporary = directory / ".state.new"
    with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
        json.dump(asdict(state), file)
    temporary.rename(directory / "state.json")


def read_state(directory: Path) -> MountState | None:
    """None where there is none, none that can be read, or another user's: not to be acted upon."""
    try:
        with (directory / "state.json").open(encoding="utf-8") as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            document = json.loads(file.read(_STATE_BYTES_MAX))
        return MountState(**{name: document[name] for name in MountState.__struct_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def live_mounts(settings: Settings) -> Iterator[tuple[Path, MountState]]:
    """Each mount whose server lives, the oldest first."""
    yield from _known_mounts(settings, alive=True)


def dead_mounts(settings: Settings) -> Iterator[tuple[Path, MountState]]:
    """Each mount whose server died and that nobody has swept yet, the oldest first."""
    yield from _known_mounts(settings, alive=False)


def _known_mounts(settings: Settings, *, alive: bool) -> list[tuple[Path, MountState]]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for directory in mounts_dir(settings).iterdir():
            state = read_state(directory)
            if state is not None and is_alive(directory) is alive:
                found.append((directory, state))
    return sorted(found, key=lambda pair: pair[1].started_ns)


def sweep(settings: Settings) -> int:
    """Remove what dead servers left: mounts, folders, old logs. Returns how many mounts."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for directory in mounts_dir(settings).iterdir():
            try:
                count += _sweep_one(directory)
            except Exception as error:
                # One that cannot be cleaned must not keep the others, and the next start, waiting.
                _log.warning("cannot clean up the dead mount %s: %s", directory, error)
    _sweep_logs(settings)
    # Here: whoever starts a server needs nothing of it.
    from bootseer.prefetch.cache.kept_indexes import remove_held

    remove_held(settings.run_dir)
    return count


def sweep_dead(settings: Settings, target: Path) -> bool:
    """As `sweep`, of what was mounted on `target` by a server that died; False where none was."""
    found = [folder for folder, state in dead_mounts(settings) if state.directory == str(target)]
    return sum(map(_sweep_one, found)) > 0


def remove_mount_dir(directory: Path) -> None:
    """Remove a mount's folder, as the holder of its lock. Never raises.

    The lock goes last: whoever waits for the end (`wait_released`) then finds no half of a folder.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name != "lock":
                with contextlib.suppress(OSError):
                    if path.is_dir() and not path.is_symlink():
                        remove_tree(path)
                    else:
                        path.unlink()
        (directory / "lock").unlink(missing_ok=True)
        directory.rmdir()


def remove_scratch(directory: Path) -> None:
    """Remove what a container has written, as far as that can be done. Never raises."""
    with contextlib.suppress(OSError):
        # Of a cache that cannot take what is written: it went to memory.
        namespaces.unmount(directory)
    try:
        remove_tree(directory)
    except OSError as error:
        _log.warning("cannot remove all of %s, which a container wrote: %s", directory, error)


def _sweep_one(directory: Path) -> bool:
    # What another user's folder says about where to unmount and what to remove is not for us.
    try:
        if not is_own(directory.stat(follow_symlinks=False)):
            return False
    except OSError:
        return False
    # Without the grace a folder that is being made this moment would go: between the creation of
    # its lock and the locking, too.
    if not (directory / "state.json").exists():
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime < 60:
                return False
    try:
        lock = take_lock(directory)
    except OSError:
        return False
    try:
        state = read_state(directory)
        if state is not None:
            uncover_all(state.id)
            if any(cover.id == state.id for cover in covers()):
                # Below another one: only who finds this folder later can take it off.
                return False
            _unmount_left_over(Path(state.directory))
            if state.scratch:
                remove_scratch(Path(state.scratch))
        remove_mount_dir(directory)
    finally:
        os.close(lock)
    _log.info("removed what the dead mount %s left", directory.name)
    return True


def _unmount_left_over(path: Path) -> None:
    """Unmount our dead file system there; a live one of somebody else stays."""
    mount = mounts.find_mount(path)
    if mount is None or not mount.subtype.startswith("bootseer"):
        return
    try:
        mounts.detach(path, lazy=True)
    except BootseerError as error:
        _log.warning("cannot unmount %s, which a dead server left: %s", path, error)


def _sweep_logs(settings: Settings) -> None:
    with contextlib.suppress(FileNotFoundError):
        logs = sorted(
            (settings.run_dir / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime
        )
        for path in logs[:-_LOGS_KEPT]:
            path.unlink(missing_ok=True)
