"""What a start will most likely read first, fetched before anybody asks.

Owns the rule that names the newest complete checkpoint: a tracker file that the usual frameworks
write, else what changed last. The fetching itself is the reader's, below every other urgency.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence

from bootseer.errors import BootseerError
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.store.backend import FileInfo

_log = logging.getLogger(__name__)

_MAX_DEPTH = 4
_MAX_FILES = 10_000
_MAX_TRACKER_BYTES = 4096
_NUMBER = re.compile(r"\d{1,18}")


def tracked_name(trackers: dict[str, str], names: Sequence[str]) -> str | None:
    """Which of `names` the tracker files mean; None where they mean none. Pure.

    `trackers`: content by name. `latest` holds a name (DeepSpeed, and what people write by hand);
    `latest_checkpointed_iteration.txt` holds a number (Megatron), as in `iter_0001000`.
    """
    for text in (trackers.get("latest"), trackers.get("latest_checkpointed_iteration.txt")):
        wanted = (text or "").strip().rstrip("/").rpartition("/")[2]
        if not wanted:
            continue
        if wanted in names:
            return wanted
        if _NUMBER.fullmatch(wanted):
            for name in names:
                found = _NUMBER.findall(name)
                if found and int(found[-1]) == int(wanted):
                    return name
    return None


def newest_files(storage: StripedStorage) -> Iterator[FileInfo]:
    """The files of the newest complete checkpoint, in the order in which they are worth reading.

    Files that are being saved right now are not visible yet, so what is visible is whole.
    """
    tree = storage.tree
    entries = tree.stored.entries("")
    trackers = {}
    for info in entries:
        name = info.path
        if name in ("latest", "latest_checkpointed_iteration.txt") and not info.is_dir:
            data = storage.backend.read(info.path, 0, _MAX_TRACKER_BYTES)
            trackers[name] = data.decode("utf-8", errors="replace")
    rest = [info for info in entries if info.path not in trackers]
    if not rest:
        return
    wanted = tracked_name(trackers, [info.path for info in rest])
    chosen = next((info for info in rest if info.path == wanted), None)
    if chosen is None:
        chosen = max(rest, key=lambda info: (info.modified_ns, info.path))
    yield from _files(storage, chosen, _MAX_DEPTH)


def _files(storage: StripedStorage, info: FileInfo, depth: int) -> Iterator[FileInfo]:
    if not info.is_dir:
        yield info
    elif depth:
        for child in storage.tree.stored.entries(info.path):
            yield from _files(storage, child, depth - 1)


def warm_newest(
    storage: StripedStorage, budget_bytes: int, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """Fetch the newest checkpoint into the window, at most `budget_bytes`; returns how much.

    Never raises: what cannot be warmed will be read when it is asked for.
    """
    done = 0
    try:
        for count, info in enumerate(newest_files(storage)):
            if done >= budget_bytes or cancelled() or count >= _MAX_FILES:
                break
            file = storage.reader.open(storage.tree.stored.view(info.path))
            try:
                done += storage.reader.warm(file, budget_bytes - done, cancelled)
            finally:
                storage.reader.close(file)
    except (BootseerError, OSError) as error:
        _log.warning("the newest checkpoint is not read ahead: %s", error)
    return done
