"""Plan of a collection, made from an inventory and the user's rules. Pure (no I/O).

Mark and sweep over the graph of the records' links. The roots are records that the rules keep,
objects noted as in use, and objects younger than the grace time; objects reachable from a root
stay. The rest is deleted in the order of the formats, each of which comes before the formats that
it may refer to, so that no record ever refers to a deleted object.

`Rules` are the user's: they decide about the records that users name, and about old timelines.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.gc.inventory import Inventory, StoredObject
from bootseer.store.objects.records import RecordEntry
from bootseer.store.objects.uses import IN_USE_S

# ---- retention: records that users name ---------------------------------------------------------

DAY_S = 86_400
CACHE_DAYS = 30.0
"""A kept cache that was unused for this time is deleted; a start makes it again."""


class Rules(Struct, frozen=True):
    """The user's rules for a collection.

    Without `keep_last` and `keep_days`, all snapshots stay except those named in `snapshots` and
    kept caches that were unused for `CACHE_DAYS`.
    """

    keep_last: int | None = None
    """Number of the newest snapshots that stay of each group with the same targets and command."""
    keep_days: float | None = None
    """Snapshots that were made or used within this number of days stay."""
    keep: tuple[str, ...] = ()
    """Names (shell patterns) or beginnings of keys of snapshots that stay in any case."""
    snapshots: tuple[str, ...] = ()
    """Names or beginnings of keys of snapshots to remove in any case."""
    images: tuple[str, ...] = ()
    """References of images to remove."""
    keep_starts: int = 20
    """Number of the newest starts of each job whose timelines stay, for `keep_start_days` at most.
    """
    keep_start_days: float = 90.0
    grace_s: float = DAY_S
    """Younger objects stay: a record that refers to them may not be published yet."""


class RetentionVerdict(Struct, frozen=True):
    """Decision about one snapshot or image."""

    is_kept: bool
    reason: str


def judge(inventory: Inventory, rules: Rules) -> dict[str, RetentionVerdict]:
    """Return the verdict on each record that users name, by key.

    Raises: NotFoundError, InvalidInputError if a name in the rules fits none or several.
    """
    entries = dict(inventory.entries())
    doomed = {_find_snapshot(inventory, entries, text) for text in rules.snapshots}
    doomed.update(key for text in rules.images for key in _find_images(entries, text))
    ranks, labels = _ranks(entries), inventory.labels()
    return {
        key: RetentionVerdict(False, "asked for")
        if key in doomed
        else _judge(inventory, rules, key, entry, ranks[key], labels.get(key, ()))
        for key, entry in entries.items()
    }


def _judge(
    inventory: Inventory,
    rules: Rules,
    key: str,
    entry: RecordEntry,
    rank: int,
    labels: Sequence[str],
) -> RetentionVerdict:
    if entry.kind == "image":
        return RetentionVerdict(True, "not named")
    now_ns = inventory.now_ns
    if entry.is_cache:
        # Each kept cache has a single record: a new generation replaces the old one.
        days = CACHE_DAYS if rules.keep_days is None else rules.keep_days
        rules = replace(rules, keep_last=None, keep_days=days)
    if rules.keep_last is None and rules.keep_days is None:
        return RetentionVerdict(True, "no rule removes it")
    for pattern in rules.keep:
        is_start = len(pattern) >= 4 and entry.name.startswith(pattern)
        if is_start or any(fnmatchcase(label, pattern) for label in labels):
            return RetentionVerdict(True, f"--keep {pattern}")
    used_ns = inventory.last_used_ns(entry.trees)
    if now_ns - used_ns < IN_USE_S * 10**9:
        return RetentionVerdict(True, "in use")
    made_ns = inventory.objects[key].modified_ns
    if now_ns - made_ns < rules.grace_s * 1e9:
        return RetentionVerdict(True, "too young")
    if rules.keep_last is not None and rank < rules.keep_last:
        return RetentionVerdict(True, f"one of the newest {rules.keep_last}")
    age_s = (now_ns - max(used_ns, made_ns)) / 1e9
    if rules.keep_days is not None and age_s < rules.keep_days * DAY_S:
        return RetentionVerdict(True, f"made or used within {rules.keep_days:g} days")
    return RetentionVerdict(False, "no rule keeps it")


def _ranks(entries: Mapping[str, RecordEntry]) -> dict[str, int]:
    """Return for each entry the number of newer entries in its group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, entry in entries.items():
        groups[entry.kind + entry.group].append(key)
    ranks = {}
    for keys in groups.values():
        keys.sort(key=lambda key: entries[key].created_ns, reverse=True)
        ranks.update({key: rank for rank, key in enumerate(keys)})
    return ranks


def _find_snapshot(inventory: Inventory, entries: Mapping[str, RecordEntry], text: str) -> str:
    for one in inventory.objects.values():
        if text and one.links.label == text:
            return one.links.hangs_on[0]
    found = [
        key
        for key, entry in entries.items()
        if entry.kind == "snapshot" and len(text) >= 4 and entry.name.startswith(text)
    ]
    if not found:
        raise NotFoundError(f"there is no snapshot {text} to remove; see `snapshot list`")
    if len(found) > 1:
        raise InvalidInputError(f"{len(found)} snapshots begin with {text}; give more digits")
    return found[0]


def _find_images(entries: Mapping[str, RecordEntry], text: str) -> list[str]:
    names = (text, f"{text}:latest")
    found = [key for key, one in entries.items() if one.kind == "image" and one.name in names]
    if not found:
        raise NotFoundError(f"there is no image {text} to remove; see `image list`")
    return found


def old_members(inventory: Inventory, rules: Rules) -> set[str]:
    """Return the keys of the objects in series whose members the rules do not keep.

    A member is as old as its newest object. See `ObjectFormat.series`.
    """
    every: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key, one in inventory.objects.items():
        if one.format is not None and one.format.series and (place := one.format.series(key)):
            every[place[0]][place[1]].append(key)
    limit_ns = inventory.now_ns - int(rules.keep_start_days * DAY_S * 1e9)
    old: set[str] = set()
    for series, members in every.items():
        by_age = sorted(
            (max(inventory.objects[key].modified_ns for key in keys), name)
            for name, keys in members.items()
        )
        count = max(0, len(by_age) - rules.keep_starts) if series else 0
        for number, (newest_ns, name) in enumerate(by_age):
            if number < count or newest_ns < limit_ns:
                old.update(members[name])
    return old


# ---- the collection -----------------------------------------------------------------------------


class CollectionPlan(Struct, frozen=True):
    """Objects to delete, with reasons."""

    verdicts: Mapping[str, RetentionVerdict]
    """Verdicts on the records that users name, by key."""
    deletions: tuple[str, ...]
    """Keys in the order of deletion."""
    freed_bytes: int


def make_plan(inventory: Inventory, rules: Rules) -> CollectionPlan:
    """Return the plan for an inventory under the user's rules.

    Raises: NotFoundError, InvalidInputError if the rules name a missing or ambiguous record.
    """
    verdicts = judge(inventory, rules)
    doomed = {key for key, verdict in verdicts.items() if not verdict.is_kept}
    kept = _reachable(inventory, _roots(inventory, rules, doomed))
    ranks = {id(one): rank for rank, one in enumerate(inventory.formats)}
    deletions = sorted(
        (key for key in inventory.objects if key not in kept),
        key=lambda key: (ranks[id(inventory.objects[key].format)], key),
    )
    freed = sum(inventory.objects[key].size_bytes for key in deletions)
    return CollectionPlan(verdicts, tuple(deletions), freed)


def stages(inventory: Inventory, deletions: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of keys that may be deleted in any order: they do not refer to each other.

    `deletions`: keys in the order of a plan.
    """
    for _, keys in groupby(deletions, key=lambda key: id(inventory.objects[key].format)):
        yield list(keys)


def _roots(inventory: Inventory, rules: Rules, doomed: set[str]) -> Iterator[str]:
    """Yield the keys of objects that stay even if no other object refers to them."""
    limit_ns = inventory.now_ns - int(rules.grace_s * 1e9)
    old = old_members(inventory, rules)
    for key, one in inventory.objects.items():
        hangs_on = one.links.hangs_on
        # A young name of a deleted snapshot is deleted as well.
        is_doomed = key in doomed or (hangs_on and doomed.issuperset(hangs_on))
        if (
            one.format is None
            or (one.modified_ns > limit_ns and not is_doomed)
            or (one.links.entry is not None and key not in doomed)
            or (one.format.series is not None and key not in old)
            or _is_fresh(inventory, one)
        ):
            yield key


def _is_fresh(inventory: Inventory, one: StoredObject) -> bool:
    fresh_s = one.format.fresh_s if one.format is not None else 0.0
    return bool(fresh_s) and inventory.now_ns - one.modified_ns < fresh_s * 1e9


def _reachable(inventory: Inventory, roots: Iterable[str]) -> set[str]:
    """Return the keys of all objects that are reachable from the roots."""
    objects = inventory.objects
    every = sorted(objects)
    hanging: defaultdict[str, list[str]] = defaultdict(list)
    for key, one in objects.items():
        for other in one.links.hangs_on:
            hanging[other].append(key)
    kept: set[str] = set()
    lenders: set[str] = set()
    # (key, whether another object needs it)
    waiting = [(key, False) for key in roots]
    while waiting:
        key, is_needed = waiting.pop()
        if key.endswith("/"):
            if key not in kept:
                kept.add(key)
                waiting += ((one, is_needed) for one in _below(every, key))
            continue
        found = objects.get(key)
        if found is not None and is_needed and key not in lenders:
            lenders.add(key)
            waiting += ((one, True) for one in found.links.lends)
        if key in kept:
            continue
        kept.add(key)
        waiting += ((one, False) for one in hanging[key])
        is_outdated = found is None or (
            found.format is not None and found.format.fresh_s and not _is_fresh(inventory, found)
        )
        if found is not None and not is_outdated:
            waiting += ((one, True) for one in found.links.needs)
    return kept


def _below(every: Sequence[str], folder: str) -> Iterator[str]:
    """Yield the keys in a folder, from all keys in order."""
    for at in range(bisect_left(every, folder), len(every)):
        if not every[at].startswith(folder):
            return
        yield every[at]
