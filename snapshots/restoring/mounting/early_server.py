"""A mount's server that is begun before anything is known of the snapshot.

It loads its code beside all that a restore does first, and is a copy of this process: only for a
program of ours, at its beginning. Light: its caller loads the rest of `snapshots` afterwards.
One thread per process.
"""

import contextlib
from collections.abc import Iterator

from bootseer.errors import BootseerError
from bootseer.prefetch.serve.server import begin_tree_server
from bootseer.served.background import (
    ServerProcess,
    end_early,
    is_begun_ahead,
    may_mount,
)
from bootseer.settings.config import Settings
from bootseer.snapshots.restoring.modes import AUTO, MOUNT


@contextlib.contextmanager
def early_server(settings: Settings) -> Iterator[ServerProcess | None]:
    """A server for what will probably be mounted, ended behind the `with` block if it was not
    needed; None where nothing will be mounted, or none can be begun."""
    process = None
    if settings.restore_mode in (AUTO, MOUNT) and may_mount():
        if not is_begun_ahead():
            # What both need is loaded once.
            import bootseer.snapshots.restoring.restore_modes  # noqa: F401
            from bootseer.store import load_backend

            load_backend(settings.store_url)
        # The caller that needs one tells what is wrong.
        with contextlib.suppress(BootseerError):
            process = begin_tree_server(settings, forks=True)
    else:
        end_early()
    try:
        yield process
    finally:
        if process is not None:
            process.abandon()
