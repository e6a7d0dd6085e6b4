"""Rules of users: the snapshots, images and timelines that stay. Pure (no I/O)."""

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
"""A kept cache that nobody used for so long goes: a start makes it again."""


class Rules(Struct, frozen=True):
    """Retention rules that a user gives for a collection.

    Without `keep_last` and `keep_days`, a collection removes the snapshots named in `snapshots` and
    the kept caches that no start used for `CACHE_DAYS`.
    """

    keep_last: int | None = None
    """How many of the newest stay of each group with the same targets and command."""
    keep_days: float | None = None
    """What was made or used within so many days."""
    keep: tuple[str, ...] = ()
    """Names (patterns as in a shell) or starts of keys of snapshots that stay in any case."""
    snapshots: tuple[str, ...] = ()
    """Names or starts of keys of snapshots to remove in any case."""
    images: tuple[str, ...] = ()
    """References of images to remove."""
    keep_starts: int = 20
    """How many of the newest starts of each job keep their timelines, at most `keep_start_days`."""
    keep_start_days: float = 90.0
    grace_s: float = DAY_S
    """Younger objects stay: an object that refers to them may be on its way."""


class Verdict(Struct, frozen=True):
    """Decision about one snapshot or image."""

    is_kept: bool
    reason: str


def judge(inventory: Inventory, rules: Rules) -> dict[str, Verdict]:
    """Return the verdict on each record that users name, by key.

    Raises: NotFoundError, InvalidInputError where the rules name none or several.
    """
    entries = dict(inventory.entries())
    doomed = {_find_snapshot(inventory, entries, text) for text in rules.snapshots}
    doomed.update(key for text in rules.images for key in _find_images(entries, text))
    ranks, labels = _ranks(entries), inventory.labels()
    return {
        key: Verdict(False, "asked for")
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
) -> Verdict:
    if entry.kind == "image":
        return Verdict(True, "not named")
    now_ns = inventory.now_ns
    if entry.is_cache:
        # Of each there is one: the newest generation has taken the place of the others.
        days = CACHE_DAYS if rules.keep_days is None else rules.keep_days
        rules = replace(rules, keep_last=None, keep_days=days)
    if rules.keep_last is None and rules.keep_days is None:
        return Verdict(True, "no rule removes it")
    for pattern in rules.keep:
        is_start = len(pattern) >= 4 and entry.name.startswith(pattern)
        if is_start or any(fnmatchcase(label, pattern) for label in labels):
            return Verdict(True, f"--keep {pattern}")
    used_ns = inventory.last_used_ns(entry.trees)
    if now_ns - used_ns < IN_USE_S * 10**9:
        return Verdict(True, "in use")
    made_ns = inventory.objects[key].modified_ns
    if now_ns - made_ns < rules.grace_s * 1e9:
        return Verdict(True, "too young")
    if rules.keep_last is not None and rank < rules.keep_last:
        return Verdict(True, f"one of the newest {rules.keep_last}")
    age_s = (now_ns - max(used_ns, made_ns)) / 1e9
    if rules.keep_days is not None and age_s < rules.keep_days * DAY_S:
        return Verdict(True, f"made or used within {rules.keep_days:g} days")
    return Verdict(False, "no rule keeps it")


def _ranks(entries: Mapping[str, RecordEntry]) -> dict[str, int]:
    """Return of each entry how many of its group are newer."""
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
    """Return the keys of the members of series that go: whole members, by the newest object of
    each."""
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
