"""A server's life in its folder: from the lock to the folder's removal.

Light: the code of a server loads beside whatever a start has to do. One thread per process.
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


class Life(Struct, frozen=True):
    """What a server that lives knows of itself."""

    state: "MountState"
    lock: int
    """The descriptor that holds its folder's lock."""


@contextlib.contextmanager
def living(
    directory: Path, state: "MountState", lock: int | None = None, *, sweeps: bool = True
) -> Iterator["Life"]:
    """While a server, this process, lives: its folder says `state`, and the folder's lock is held.
    `lock`, where this process has taken the server's life over from another one.

    What dead servers left is removed at the beginning, unless the caller `sweeps` itself; at the
    end this one's overlays, what was
    written to them, and its folder, but for the state where that says what was lost.
    Raises: BootseerError.
    """
    # Here: a process that waits for its plan needs none of it.
    from bootseer.linux.namespaces import mount_namespace
    from bootseer.linux.processes import start_time
    from bootseer.served import ending, folders
    from bootseer.served.covers import uncover_all

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
        yield Life(state, lock)
    finally:
        uncover_all(state.id)
        if state.scratch:
            ending.remove_scratch(Path(state.scratch))
        last = folders.read_state(directory)
        if last is not None and last.unwritten:
            with contextlib.suppress(OSError):
                folders.empty_mount_dir(directory, "state.json")
        else:
            # The folder last: it is what says that the mount is not quite gone.
            folders.remove_mount_dir(directory)
        os.close(lock)
