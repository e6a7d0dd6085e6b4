"""The place of a volume in a kubelet's folder: checked, mounted on, looked at, and freed.

Alone mounts and unmounts there. Nothing here touches what is mounted but `usage_of`, which waits
for it no longer than its deadline. Stateless; any thread.
"""

import os
import queue
import threading
from pathlib import Path

from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    InvalidInputError,
    from_oserror,
)
from bootseer.fuse.kernel.unmount import detach, is_disconnected
from bootseer.linux import mount_table, namespaces

_USAGE_S = 5.0
_MODE = 0o750


def checked_target(kubelet_dir: Path, target: str) -> Path:
    """The target path of a call, if it lies in the kubelet's folder. Raises: InvalidInputError."""
    path = Path(target)
    is_plain = target == str(path) and path.is_absolute() and ".." not in path.parts
    if not is_plain or "\0" in target or len(path.parts) < len(kubelet_dir.parts) + 2:
        raise InvalidInputError(f"the target path {target[:200]!r} is none of a kubelet's")
    # A link above it would lead elsewhere; it itself may be a mount that answers nothing.
    if not path.is_relative_to(kubelet_dir) or mount_table.absolute(path) != path:
        raise InvalidInputError(
            f"the target path {target[:200]!r} does not lie in {kubelet_dir}, the kubelet's folder"
        )
    return path


def make_target(target: Path) -> None:
    """Make the directory that is mounted on. Raises: BootseerError."""
    if minor_at(target) is not None:
        return
    try:
        target.mkdir(mode=_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the target {target}") from error


def minor_at(target: Path) -> int | None:
    """The device number of what is mounted there, topmost; None where nothing is."""
    encoded = os.fsencode(target)
    found = [point.device for point in mount_table.mount_points() if point.path == encoded]
    return os.minor(found[-1]) if found else None


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    """Show the mount `source` on `target`, without privileges of files. Raises: BootseerError."""
    flags = namespaces.MS_BIND | namespaces.MS_REMOUNT | namespaces.MS_NOSUID | namespaces.MS_NODEV
    try:
        namespaces.mount(source, target, flags=namespaces.MS_BIND)
        try:
            namespaces.mount(
                "none", target, flags=flags | (namespaces.MS_RDONLY if read_only else 0)
            )
        except OSError:
            namespaces.unmount(target)
            raise
    except OSError as error:
        raise from_oserror(error, f"show {source} on {target}") from error


def free_target(target: Path) -> None:
    """Take all that is mounted there off, and remove the directory. Idempotent. Raises: BusyError
    where a process of the node uses it; BootseerError."""
    while (minor := minor_at(target)) is not None:
        try:
            detach(target, lazy=False)
        except BusyError:
            mount = mount_table.find_mount(target)
            if mount is None or not _is_dead(target):
                raise
            # Nobody gets anything from it any more.
            detach(target, lazy=True)
        except InvalidInputError:
            if minor_at(target) == minor:
                raise
    try:
        target.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise from_oserror(error, f"remove the target {target}") from error


def _is_dead(target: Path) -> bool:
    try:
        usage_of(target)
    except DeadlineError:
        return False
    except BootseerError as error:
        return is_disconnected(error)
    return False


def usage_of(path: Path) -> os.statvfs_result:
    """What the file system at `path` says of its room. Raises: DeadlineError where it does not
    answer; BootseerError."""
    answers: queue.SimpleQueue[os.statvfs_result | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            # Listed, too: the root of an overlay is there when what it lies on is gone.
            with os.scandir(path) as entries:
                next(entries, None)
            answers.put(os.statvfs(path))
        except OSError as error:
            answers.put(error)

    # One that hangs stays behind, and ends when the mount does.
    threading.Thread(target=ask, name="usage", daemon=True).start()
    try:
        answer = answers.get(timeout=_USAGE_S)
    except queue.Empty:
        raise DeadlineError(f"the volume at {path} did not answer in {_USAGE_S:g} s") from None
    if isinstance(answer, OSError):
        raise from_oserror(answer, f"look at the volume at {path}") from answer
    return answer
