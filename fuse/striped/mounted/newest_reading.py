"""Reads the newest checkpoint ahead, since a start will most likely load it first.

Owns the search for the newest complete checkpoint in a storage; the rules are `newest`'s. The
fetching itself is the reader's, below every other urgency.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.striped.mounted.newest import (
    TRACKERS,
    is_beside,
    is_checkpoint,
    is_complete,
    is_description,
    is_like,
    is_temporary,
    steps,
    tracked_name,
)
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.store.backend import FileInfo

_log = logging.getLogger(__name__)

_MAX_DEPTH = 4
_MAX_FILES = 10_000
_MAX_TRACKER_BYTES = 4096
# Steps of a series that are looked into; each costs a listing.
_MAX_TRIED = 8


def newest_files(storage: StripedStorage) -> Iterator[FileInfo]:
    """The files of the newest complete checkpoint, in the order in which they are worth reading."""
    chosen = _newest(storage, "", _MAX_DEPTH, guess=True)
    if chosen is None:
        return
    files = []
    for info in _files(storage, chosen, _MAX_DEPTH):
        files.append(info)
        if len(files) >= _MAX_FILES:
            break
    yield from sorted(files, key=lambda info: not is_description(_name(info)))


def _name(info: FileInfo) -> str:
    return info.path.rpartition("/")[2]


def _files(storage: StripedStorage, info: FileInfo, depth: int) -> Iterator[FileInfo]:
    if not info.is_dir:
        yield info
    elif depth:
        for child in storage.tree.stored.entries(info.path):
            yield from _files(storage, child, depth - 1)


def _newest(storage: StripedStorage, folder: str, depth: int, *, guess: bool) -> FileInfo | None:
    """The newest complete checkpoint in a folder, which may be the folder itself.

    `guess`: where names tell nothing, the newest file or folder is taken.
    """
    entries = {_name(info): info for info in storage.tree.stored.entries(folder)}
    trackers = {name: _text(storage, entries[name]) for name in TRACKERS if name in entries}
    for name in trackers:
        del entries[name]
    tracked = tracked_name(trackers, list(entries))
    if tracked is not None and _verdict(storage, entries[tracked]) is not False:
        return entries[tracked]
    series = [[entries[name] for name in names] for names in steps(entries)]
    # A run that begins anew counts from the start: what was saved last decides between series.
    series.sort(key=lambda infos: -max(info.modified_ns for info in infos))
    # Beside its steps Hugging Face's trainer puts the model, in the end.
    for wants_dirs in (True, False):
        for infos in series:
            chosen = _newest_step(storage, [i for i in infos if i.is_dir == wants_dirs])
            if chosen is not None:
                return _within(storage, chosen, depth)
        if wants_dirs and is_checkpoint(entries):
            return FileInfo(folder, 0, 0, True)
    in_series = {info.path for infos in series for info in infos}
    rest = [
        info
        for name, info in entries.items()
        if not (info.path in in_series or is_temporary(name) or is_beside(name))
    ]
    if not guess and (len(rest) > 1 or not all(info.is_dir for info in rest)):
        return None
    for info in sorted(rest, key=lambda info: (-info.modified_ns, info.path))[:_MAX_TRIED]:
        if not info.is_dir:
            return info
        found = _newest(storage, info.path, depth - 1, guess=guess) if depth > 1 else None
        if found is not None:
            return found
    return None


def _within(storage: StripedStorage, chosen: FileInfo, depth: int) -> FileInfo:
    """`chosen`, or the newest checkpoint in it where it is a run rather than a step."""
    if not chosen.is_dir or depth <= 1:
        return chosen
    inside = storage.tree.stored.entries(chosen.path)
    names = [_name(info) for info in inside]
    if is_checkpoint(names) or any(not i.is_dir and not is_beside(_name(i)) for i in inside):
        return chosen
    return _newest(storage, chosen.path, depth - 1, guess=False) or chosen


def _newest_step(storage: StripedStorage, infos: Sequence[FileInfo]) -> FileInfo | None:
    """The first of a series, newest first, that is whole."""
    for number, info in enumerate(infos[:_MAX_TRIED]):
        verdict = _verdict(storage, info)
        if verdict is None and number + 1 < len(infos) and info.is_dir:
            verdict = is_like(_inside(storage, info), _inside(storage, infos[number + 1]))
        if verdict is not False:
            return info
    return None


def _verdict(storage: StripedStorage, info: FileInfo) -> bool | None:
    # A file that is being written is not visible yet, so one that is visible is whole.
    return is_complete(_name(info), _inside(storage, info)) if info.is_dir else True


def _inside(storage: StripedStorage, info: FileInfo) -> list[str]:
    return [_name(child) for child in storage.tree.stored.entries(info.path)]


def _text(storage: StripedStorage, info: FileInfo) -> str:
    try:
        data = storage.backend.read(info.path, 0, _MAX_TRACKER_BYTES)
    except NotFoundError:
        return ""
    return data.decode("utf-8", errors="replace")


def read_newest(
    storage: StripedStorage, budget_bytes: int, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """Fetch the newest checkpoint into the window, at most `budget_bytes`; returns how much.

    Never raises: what cannot be warmed will be read when it is asked for.
    """
    done = 0
    try:
        for info in newest_files(storage):
            if done >= budget_bytes or cancelled():
                break
            file = storage.reader.open(storage.tree.stored.view(info.path))
            try:
                done += storage.reader.warm(file, budget_bytes - done, cancelled)
            finally:
                storage.reader.close(file)
    except (BootseerError, OSError) as error:
        _log.warning("the newest checkpoint is not read ahead: %s", error)
    return done
