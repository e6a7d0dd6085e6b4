"""Retention rules: which snapshots, images and timelines stay. Pure (no I/O)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.gc.inventory import Inventory
from bootseer.store.objects.records import RecordEntry
from bootseer.store.objects.uses import IN_USE_S

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
    """Return the keys of old members of series; the newest object of a member tells its age."""
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
