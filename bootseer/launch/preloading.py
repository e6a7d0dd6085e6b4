"""Preloaders of a start, and the import records that the nodes of a job share through the store.

A worker writes an import record on its node when it is ready. The attendant, which publishes kept
caches, also publishes the record; a node without a record fetches it from there. Only this module
uses the store's folder `preload/`. The preloader itself is in `served.preload`.
"""

import contextlib
import json
import os
from pathlib import Path

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import BootseerError
from bootseer.launch.job import Job
from bootseer.linux.private_files import write_private_file
from bootseer.profile.collect import recording_environment
from bootseer.served.preload.launching import begin_preloaders
from bootseer.served.preload.programs import read_record, record_paths
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store

FOLDER = "preload/"
"""Folder of the store with one import record per job and program."""
_BYTES_MAX = 8 << 20
# Preloading saves a few seconds, so a slow store may not cost more than this.
_FETCH_S = 2.0


def begin(settings: Settings, job: Job) -> tuple[dict[str, str], tuple[str, ...]]:
    """Begin the preloaders, with import records from the store if this node has none.

    Return variables for the job, and its command. Raises: BootseerError, OSError.
    """
    paths = record_paths(settings)
    if not WAIT_BUDGET.is_spent and not paths[0].exists():
        with (
            contextlib.suppress(BootseerError, OSError),
            contextlib.closing(open_own_store(settings, deadline_s=_FETCH_S)) as store,
        ):
            for path in paths:
                write_private_file(path, store.read(_key(path), 0, _BYTES_MAX))
    environ = recording_environment(os.environ)
    return begin_preloaders(settings, environ, job.command, is_standby=job.is_standby)


def publish(settings: Settings, store: Store) -> bool:
    """Publish this node's import records unless the store has equal ones; return whether it did.

    Raises: BootseerError, OSError.
    """
    return sum(_publish(path, store) for path in record_paths(settings)) > 0


def _publish(path: Path, store: Store) -> bool:
    if read_record(path) is None:
        return False
    data = path.read_bytes()
    # An object that cannot be read as a record is replaced.
    with contextlib.suppress(BootseerError, OSError, ValueError, AttributeError):
        if _compared(data) == _compared(store.read(_key(path), 0, _BYTES_MAX)):
            return False
    store.publish(_key(path), data, replace=True)
    return True


def _compared(data: bytes) -> object:
    """Return the members of a record to compare: salts and digests differ at each start."""
    record = json.loads(data)
    return [record.get(name) for name in ("executable", "words", "modules", "missing")]


def _key(path: Path) -> str:
    return f"{FOLDER}{path.name}"
