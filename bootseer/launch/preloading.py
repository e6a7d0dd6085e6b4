"""The preloader of a start, and the records of imports that the nodes of a job share.

A worker writes such a record on its node when it is ready; the process that publishes kept caches
puts it into the store, where a node that has none finds it. Alone owns its key there. The preloader
itself is `served.preload`'s.
"""

import contextlib
import json
import os

from bootseer.errors import BootseerError
from bootseer.linux.private_files import write_private_file
from bootseer.profile.collect import watched
from bootseer.served.preload.launching import begin_preloader, read_record, record_path
from bootseer.settings.config import Settings
from bootseer.store import Store, open_own_store

FOLDER = "preload/"
"""Below it in the store is a record of each job."""
_BYTES_MAX = 8 << 20
# A start that preloads nothing loses some seconds: the store is not waited for as long.
_ASK_S = 2.0


def begin(
    settings: Settings, command: tuple[str, ...], *, is_silent: bool
) -> tuple[dict[str, str], str]:
    """As `begin_preloader`, with the record of another node where this one has none. `is_silent`:
    somebody has just waited for the store in vain.

    Raises: BootseerError, OSError; then there is no preloader.
    """
    path = record_path(settings)
    if not is_silent and not path.exists():
        with (
            contextlib.suppress(BootseerError, OSError),
            contextlib.closing(open_own_store(settings, deadline_s=_ASK_S)) as store,
        ):
            write_private_file(path, store.read(_key(settings), 0, _BYTES_MAX))
    return begin_preloader(settings, watched(os.environ), command)


def publish(settings: Settings, store: Store) -> bool:
    """Put this node's record into the store where it names other modules than the one there.
    Returns whether it did. Raises: BootseerError, OSError."""
    record = read_record(record_path(settings))
    if record is None:
        return False
    data = record_path(settings).read_bytes()
    # What is no record is replaced.
    with contextlib.suppress(BootseerError, OSError, ValueError, AttributeError):
        if _decides(data) == _decides(store.read(_key(settings), 0, _BYTES_MAX)):
            return False
    store.publish(_key(settings), data, replace=True)
    return True


def _decides(data: bytes) -> object:
    """What of a record makes a difference: salts and digests are others at each start."""
    record = json.loads(data)
    return [record.get(name) for name in ("executable", "words", "modules", "missing")]


def _key(settings: Settings) -> str:
    return f"{FOLDER}{settings.job}.json"
