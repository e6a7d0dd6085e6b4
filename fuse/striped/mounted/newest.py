"""Search for the newest complete checkpoint of a folder, and its read-ahead for a start.

The rules follow what the usual frameworks write last: Megatron and DeepSpeed a tracker file with
the name of the checkpoint, torch.distributed.checkpoint `.metadata`, the trainer of Hugging Face
`trainer_state.json`. Any other step is complete if it has as many files as the step before it. The
rules are pure functions of names. Files are fetched with the lowest priority.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.view import FileView
from bootseer.store.backend import FileInfo
from bootseer.transfer.ranges import Chunk

if TYPE_CHECKING:
    from bootseer.fanout.local import SharedRanges

_log = logging.getLogger(__name__)

_MAX_DEPTH = 4
_MAX_FILES = 10_000
_MAX_TRACKER_BYTES = 4096
# Steps of a series that are examined; each costs a listing.
_MAX_TRIED = 8

TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
"""Tracker files, in order of precedence."""

_NUMBER = re.compile(r"\d{1,18}")
# iter_0001000, global_step1000, checkpoint-500, step_20, epoch=1-step=200.ckpt, model_5.pt
_STEP = re.compile(r"(.*?)(\d{1,18})(\.[A-Za-z]\w*)?")
# mp_rank_00, zero_pp_rank_0_mp_rank_00_optim_states.pt, layer_01-model_00-model_states.pt,
# __0_0.distcp, rng_state_0.pth, random_states_0.pkl, pytorch_model_fsdp_0, model-00001-of-00004.bin
_PART = re.compile(
    r"rank[_.-]?\d|shard|-of-\d|\.distcp$|_states|rng_state|fsdp_\d|^__\d+_\d+|^distcp", re.I
)
_SHARD = re.compile(r"(.*)-(\d{3,6})-of-(\d{3,6})(\..*)")
_TEMPORARY = re.compile(r"^tmp[._-]|\.tmp$|\.tmp[._-]|-tmp-|\.partial$|-unfinished$|\.incomplete$")
_HF_STEP = re.compile(r"checkpoint-\d+")
_HF_FILE = re.compile(
    r"config\.json|generation_config\.json|(adapter_)?model.*\.safetensors|pytorch_model.*\.bin|"
    r"optimizer\.(pt|bin)|scheduler\.pt|training_args\.bin|rng_state.*\.pth"
)
_SIDE_FILE = re.compile(
    r"logs?|runs|wandb|tensorboard|mlruns|events\.out\..*|"
    r".*\.(log|jsonl?|yaml|yml|txt|csv|md|py|sh)"
)
_MARKERS = frozenset(
    (".metadata", "metadata.json", "trainer_state.json", "config.json", "model_index.json")
)


def tracked_name(trackers: dict[str, str], names: Sequence[str]) -> str | None:
    """Return the item of `names` that the tracker files name, or None.

    `trackers`: content by file name. `latest` holds a name (DeepSpeed, and people's own scripts);
    `latest_checkpointed_iteration.txt` holds a number (Megatron), as in `iter_0001000`, or
    "release".
    """
    for text in (trackers.get(name) for name in TRACKERS):
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


def is_temporary(name: str) -> bool:
    """Return whether the name marks an unfinished file or folder."""
    return _TEMPORARY.search(name) is not None


def is_side_file(name: str) -> bool:
    """Return whether the name is of a file that lies beside checkpoints, such as a log."""
    return _SIDE_FILE.fullmatch(name) is not None


def is_checkpoint(names: Iterable[str]) -> bool:
    """Return whether a folder with these names is a checkpoint and not a folder of several."""
    return any(
        name in _MARKERS or name.endswith(".index.json") or _PART.search(name) for name in names
    )


def step_series(names: Iterable[str]) -> list[list[str]]:
    """Return the names that end in a number, as series with the highest number first.

    `epoch_1` and `step_1` belong to two series. Unfinished files and folders are left out.
    """
    series: dict[str, list[tuple[int, str]]] = defaultdict(list)
    names = set(names)
    for name in names:
        match = _STEP.fullmatch(name)
        # NeMo puts a file `NAME-unfinished` beside a checkpoint until it is whole.
        is_unfinished = is_temporary(name) or f"{name}-unfinished" in names
        if match is None or is_unfinished or _PART.search(name) or is_side_file(name):
            continue
        family = _NUMBER.sub("#", match[1]) + "#" + (match[3] or "")
        series[family].append((int(match[2]), name))
    return [
        [name for _, name in sorted(found, reverse=True)] for _, found in sorted(series.items())
    ]


def is_complete(name: str, inside: Collection[str]) -> bool | None:
    """Return whether a folder with these names is a complete step; None if that is unknown."""
    if not inside or not _has_all_shards(inside):
        return False
    if any(entry.endswith(".metadata") for entry in inside) or "trainer_state.json" in inside:
        return True
    if any(entry.endswith(".distcp") for entry in inside):
        return False
    if _HF_STEP.fullmatch(name) and any(_HF_FILE.fullmatch(entry) for entry in inside):
        return False
    return False if any(map(is_temporary, inside)) else None


def is_description(name: str) -> bool:
    """Return whether a file describes the others, so that every rank reads it first."""
    return name.endswith((".json", ".metadata", ".txt", "common.pt", ".yaml"))


def _has_all_shards(inside: Collection[str]) -> bool:
    # `model-00001-of-00004.safetensors` announces three more files.
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in inside:
        if match := _SHARD.fullmatch(name):
            found[match[1], match[3], match[4]].add(int(match[2]))
    return all(len(numbers) >= int(total) for (_, total, _), numbers in found.items())


# ---- the search and the reading --------------------------------------------------------------


def newest_files(storage: StripedStorage) -> Iterator[FileInfo]:
    """Yield the files of the newest complete checkpoint, descriptions first."""
    chosen = _newest(storage, "", _MAX_DEPTH, guess=True)
    if chosen is None:
        return
    files = []
    for info in _files(storage, chosen, _MAX_DEPTH):
        files.append(info)
        if len(files) >= _MAX_FILES:
            break
    # The same order on every node: together they are one object of a fan-out.
    yield from sorted(files, key=lambda info: (not is_description(_name(info)), info.path))


def _name(info: FileInfo) -> str:
    return info.path.rpartition("/")[2]


def _files(storage: StripedStorage, info: FileInfo, depth: int) -> Iterator[FileInfo]:
    if not info.is_dir:
        yield info
    elif depth:
        for child in storage.tree.stored.entries(info.path):
            yield from _files(storage, child, depth - 1)


def _newest(storage: StripedStorage, folder: str, depth: int, *, guess: bool) -> FileInfo | None:
    """Return the newest complete checkpoint in a folder, which may be the folder itself.

    `guess`: take the newest file or folder if the names do not tell.
    """
    entries = {_name(info): info for info in storage.tree.stored.entries(folder)}
    trackers = {name: _text(storage, entries[name]) for name in TRACKERS if name in entries}
    for name in trackers:
        del entries[name]
    tracked = tracked_name(trackers, list(entries))
    if tracked is not None and _verdict(storage, entries[tracked]) is not False:
        return entries[tracked]
    series = [[entries[name] for name in names] for names in step_series(entries)]
    # A run that begins anew counts from the start, so the latest save decides between series.
    series.sort(key=lambda infos: -max(info.modified_ns for info in infos))
    # At its end, Hugging Face's trainer saves the model beside its steps.
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
        if not (info.path in in_series or is_temporary(name) or is_side_file(name))
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
    """Return `chosen`, or the newest checkpoint in it if it is a run and not a step."""
    if not chosen.is_dir or depth <= 1:
        return chosen
    inside = storage.tree.stored.entries(chosen.path)
    names = [_name(info) for info in inside]
    if is_checkpoint(names) or any(not i.is_dir and not is_side_file(_name(i)) for i in inside):
        return chosen
    return _newest(storage, chosen.path, depth - 1, guess=False) or chosen


def _newest_step(storage: StripedStorage, infos: Sequence[FileInfo]) -> FileInfo | None:
    """Return the first complete step of a series, which begins with the newest."""
    for number, info in enumerate(infos[:_MAX_TRIED]):
        verdict = _verdict(storage, info)
        if verdict is None and number + 1 < len(infos) and info.is_dir:
            verdict = len(_inside(storage, info)) >= len(_inside(storage, infos[number + 1]))
        if verdict is not False:
            return info
    return None


def _verdict(storage: StripedStorage, info: FileInfo) -> bool | None:
    # Files become visible when they are complete.
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
    storage: StripedStorage,
    budget_bytes: int,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    url: str = "",
    ranges: "SharedRanges | None" = None,
) -> int:
    """Fetch at most `budget_bytes` of the newest checkpoint into the window; return the count.

    With `ranges`, the nodes of a start send each other its stripe units, which are stored at `url`:
    each node of a start calls this, with the same budget. Never raises: a start reads the rest when
    it needs it.
    """
    done = 0
    try:
        views: Iterable[FileView] = _newest_views(storage, budget_bytes)
        if ranges is not None:
            views = list(views)
            _share(storage, views, budget_bytes, url, ranges)
        for view in views:
            if done >= budget_bytes or cancelled():
                break
            file = storage.reader.open(view)
            try:
                done += storage.reader.warm(file, budget_bytes - done, cancelled)
            finally:
                storage.reader.close(file)
    except (BootseerError, OSError) as error:
        _log.warning("the newest checkpoint is not read ahead: %s", error)
    return done


def _newest_views(storage: StripedStorage, budget_bytes: int) -> Iterator[FileView]:
    """Yield the files of the newest checkpoint until they have `budget_bytes`."""
    for info in newest_files(storage):
        if budget_bytes <= 0:
            return
        view = storage.tree.stored.view(info.path)
        budget_bytes -= view.size_bytes
        yield view


def _share(
    storage: StripedStorage,
    views: Sequence[FileView],
    budget_bytes: int,
    url: str,
    ranges: "SharedRanges",
) -> None:
    """Take part in the fan-out of the stripe units, unless this node has most of them."""
    from bootseer.fanout.local import can_be_shared  # here: most mounts need none of it

    chunks: list[Chunk] = []
    cached_bytes, left_bytes = 0, budget_bytes
    for view in views:
        found = view.digested_units(left_bytes)
        if can_be_shared(found):
            chunks += found
            cached_bytes += storage.reader.cached_bytes(view, left_bytes)
        left_bytes -= view.size_bytes
    if 2 * cached_bytes > sum(chunk.length for chunk in chunks):
        ranges.decline(url, chunks)
    elif ranges.share(url, chunks):
        storage.reader.share(ranges)
