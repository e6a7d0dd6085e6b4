"""Life of a server in its folder, from the locking to the removal of the folder.

Imports little, since a server's code is loaded while a start waits. One thread per process.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import from_oserror

if TYPE_CHECKING:
    from bootseer.served.folders import MountState


class HeldFolder(Struct, frozen=True):
    """The state of a living server, and the lock of its folder."""

    state: "MountState"
    lock: int
    """Descriptor that holds the lock."""


@contextlib.contextmanager
def hold_folder(
    directory: Path, state: "MountState", lock: int | None = None, *, sweeps: bool = True
) -> Iterator["HeldFolder"]:
    """Hold the folder of a server, this process: lock it and write `state` to it.

    At the begin, what dead servers left is removed, unless the caller `sweeps` itself. At the end,
    this server's overlays, its scratch folder and the folder are removed; the state stays if it
    says what was lost. `lock` is the descriptor of a server that this process replaces. Raises:
    BootseerError.
    """
    # Imported here, since a process that waits for its plan does not need them.
    from bootseer.linux.namespaces import mount_namespace
    from bootseer.linux.processes import start_time
    from bootseer.served import ending, folders
    from bootseer.served.overlays import unmount_overlays

    is_new = lock is None
    try:
        lock = folders.lock_new(directory) if lock is None else lock
    except OSError as error:
        raise from_oserror(error, f"lock {directory}") from error
    try:
        if is_new:
            if sweeps:
                ending.sweep(directory.parent.parent)
            state = replace(
                state,
                pid=os.getpid(),
                pid_started=start_time(os.getpid()),
                mount_namespace=mount_namespace(),
            )
            folders.write_state(directory, state)
        yield HeldFolder(state, lock)
    finally:
        unmount_overlays(state.id)
        if state.scratch:
            ending.remove_scratch(Path(state.scratch))
        last = folders.read_state(directory)
        if last is not None and last.unwritten:
            with contextlib.suppress(OSError):
                folders.empty_mount_dir(directory, "state.json")
        else:
            # The folder last: as long as it exists, the mount has not ended completely.
            folders.remove_mount_dir(directory)
        os.close(lock)
