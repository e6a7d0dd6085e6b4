"""The preloaders of a start, and the records of imports that the nodes of a job share.

A worker writes such a record on its node when it is ready; the process that publishes kept caches
puts it into the store, where a node that has none finds it. Alone owns its key there. The preloader
itself is `served.preload`'s.
"""

import contextlib
import json
import os
from pathlib import Path

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import BootseerError
from bootseer.launch.job import Job
from bootseer.linux.private_files import write_private_file
from bootseer.profile.collect import watched
from bootseer.served.preload.launching import begin_preloaders
from bootseer.served.preload.programs import read_record, record_paths
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store

FOLDER = "preload/"
"""Below it in the store is a record of each job."""
_BYTES_MAX = 8 << 20
# A start that preloads nothing loses some seconds: the store is not waited for as long.
_ASK_S = 2.0


def begin(settings: Settings, job: Job) -> tuple[dict[str, str], tuple[str, ...]]:
    """As `begin_preloaders`, with the records of another node where this one has none.

    Raises: BootseerError, OSError; then there is no preloader.
    """
    paths = record_paths(settings)
    if not WAIT_BUDGET.is_spent and not paths[0].exists():
        with (
            contextlib.suppress(BootseerError, OSError),
            contextlib.closing(open_own_store(settings, deadline_s=_ASK_S)) as store,
        ):
            for path in paths:
                write_private_file(path, store.read(_key(path), 0, _BYTES_MAX))
    environ = watched(os.environ)
    return begin_preloaders(settings, environ, job.command, is_standby=job.is_standby)


def publish(settings: Settings, store: Store) -> bool:
    """Put this node's records into the store where they name other modules than those there.
    Returns whether it did. Raises: BootseerError, OSError."""
    return sum(_publish(path, store) for path in record_paths(settings)) > 0


def _publish(path: Path, store: Store) -> bool:
    if read_record(path) is None:
        return False
    data = path.read_bytes()
    # What is no record is replaced.
    with contextlib.suppress(BootseerError, OSError, ValueError, AttributeError):
        if _decides(data) == _decides(store.read(_key(path), 0, _BYTES_MAX)):
            return False
    store.publish(_key(path), data, replace=True)
    return True


def _decides(data: bytes) -> object:
    """What of a record makes a difference: salts and digests are others at each start."""
    record = json.loads(data)
    return [record.get(name) for name in ("executable", "words", "modules", "missing")]


def _key(path: Path) -> str:
    return f"{FOLDER}{path.name}"
