"""Import records that the nodes of a job share, and the end of preloaders.

A worker writes an import record on its node when it is ready; in a container, into a folder from
which the attendant takes it. The attendant, which publishes kept caches, also publishes the record;
a node without a record fetches it from there. Only this module uses the store's folder `preload/`.
"""

import contextlib
import json
import os
import signal
from pathlib import Path

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import BootseerError
from bootseer.launch.job import PreloadHandoff
from bootseer.linux.private_files import write_private_file
from bootseer.served.ending import sweep_one
from bootseer.served.preload.launching import LAUNCHER_RECORD, RECORD
from bootseer.served.preload.programs import read_record, record_paths, take_record
from bootseer.served.service import PRELOAD, services, wait_released
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store

FOLDER = "preload/"
"""Folder of the store with one import record per job and program."""
_BYTES_MAX = 8 << 20
# Preloading saves a few seconds, so a slow store may not cost more than this.
_FETCH_S = 2.0
_END_S = 5.0


def fetch_records(settings: Settings, *, in_image: bool) -> None:
    """Fetch the job's records if this node has none; without them if the store fails."""
    paths = record_paths(settings, in_image=in_image)
    if not WAIT_BUDGET.is_spent and not paths[0].exists():
        with (
            contextlib.suppress(BootseerError, OSError),
            contextlib.closing(open_own_store(settings, deadline_s=_FETCH_S)) as store,
        ):
            for path in paths:
                write_private_file(path, store.read(_key(settings, path), 0, _BYTES_MAX))


def keep_records(settings: Settings, handoff: PreloadHandoff) -> None:
    """Take the records of a start on this node, and publish those that the store lacks.

    Raises: BootseerError, OSError.
    """
    paths = record_paths(settings, in_image=handoff.is_in_image)
    if handoff.is_in_image:
        for name, path in zip((RECORD, LAUNCHER_RECORD), paths, strict=True):
            take_record(handoff.job_folder / name, path)
    if handoff.publishes:
        with open_own_store(settings) as store:
            for path in paths:
                _publish(settings, path, store)


def end_preloaders(run_dir: Path) -> None:
    """End the preloaders that only this process still uses. Never raises."""
    for service in services(run_dir, lambda state: state.purpose == PRELOAD):
        if service.users() <= {os.getpid()}:
            with contextlib.suppress(OSError):
                service.state.process.kill(signal.SIGKILL)
            wait_released(service.folder, _END_S)
            sweep_one(service.folder)


def _publish(settings: Settings, path: Path, store: Store) -> None:
    if read_record(path) is None:
        return
    data = path.read_bytes()
    key = _key(settings, path)
    # An object that cannot be read as a record is replaced.
    with contextlib.suppress(BootseerError, OSError, ValueError, AttributeError):
        if _compared(data) == _compared(store.read(key, 0, _BYTES_MAX)):
            return
    store.publish(key, data, replace=True)


def _compared(data: bytes) -> object:
    """Return the members of a record to compare: salts and digests differ at each start."""
    record = json.loads(data)
    return [record.get(name) for name in ("executable", "words", "modules", "missing")]


def _key(settings: Settings, path: Path) -> str:
    return f"{FOLDER}{path.relative_to(settings.cache_dir / 'preload')}"
