"""Which snapshots and images stay: what the user's rules say. Pure (no I/O)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.gc.inventory import Inventory
from bootseer.launch.preloading import FOLDER as PRELOAD
from bootseer.profile.stored import start_of
from bootseer.snapshots.catalogue.catalogue import manifest_key
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.store.objects.uses import use_key

DAY_S = 86_400
IN_USE_S = 3 * DAY_S
"""What was noted as used within this time is in use: notes are renewed once a day, so that two
that fail are no harm."""


CACHE_DAYS = 30.0
"""A kept cache that nobody used for so long goes: a start makes it again."""


class Rules(Struct, frozen=True):
    """What the user wants to be rid of. Without `keep_last` and `keep_days` all snapshots stay but
    those named in `snapshots`, and kept caches that nobody used for `CACHE_DAYS`."""

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
    """What becomes of one snapshot or image."""

    is_kept: bool
    reason: str


def last_used_ns(inventory: Inventory, index_digests: Sequence[str]) -> int:
    """When one of these trees was last noted as used; 0: never."""
    keys = map(use_key, index_digests)
    return max(
        (inventory.objects[key].modified_ns for key in keys if key in inventory.uses), default=0
    )


def judge_snapshots(inventory: Inventory, rules: Rules) -> dict[str, Verdict]:
    """Key of each manifest -> verdict.

    Raises: NotFoundError, InvalidInputError where `rules.snapshots` names none or several.
    """
    doomed = {_find(inventory, text) for text in rules.snapshots}
    ranks = _ranks(inventory.snapshots)
    return {
        key: Verdict(False, "asked for")
        if key in doomed
        else _judge(inventory, rules, key, manifest, ranks[key])
        for key, manifest in inventory.snapshots.items()
    }


def _judge(inventory: Inventory, rules: Rules, key: str, manifest: Manifest, rank: int) -> Verdict:
    now_ns = inventory.now_ns
    if manifest.cache:
        # Of each there is one: the newest generation has taken the place of the others.
        days = CACHE_DAYS if rules.keep_days is None else rules.keep_days
        rules = replace(rules, keep_last=None, keep_days=days)
    if rules.keep_last is None and rules.keep_days is None:
        return Verdict(True, "no rule removes it")
    names = [
        name_key.rpartition("/")[2].removesuffix(".json")
        for name_key, fingerprint in inventory.names.items()
        if fingerprint == manifest.fingerprint
    ]
    for pattern in rules.keep:
        is_start = len(pattern) >= 4 and manifest.fingerprint.startswith(pattern)
        if is_start or any(fnmatchcase(name, pattern) for name in names):
            return Verdict(True, f"--keep {pattern}")
    used_ns = last_used_ns(inventory, [target.index.digest for target in manifest.targets])
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


def _ranks(snapshots: Mapping[str, Manifest]) -> dict[str, int]:
    """Key -> how many of its group are newer."""
    groups: dict[object, list[str]] = defaultdict(list)
    for key, manifest in snapshots.items():
        command = next((part.value for part in manifest.parts if part.name == "command"), "")
        groups[command, tuple(sorted(target.path for target in manifest.targets))].append(key)
    ranks = {}
    for keys in groups.values():
        keys.sort(key=lambda key: snapshots[key].created_ns, reverse=True)
        ranks.update({key: rank for rank, key in enumerate(keys)})
    return ranks


def old_starts(inventory: Inventory, rules: Rules) -> set[str]:
    """The keys of timelines that go, whole starts by the newest object of each, and of records of
    imports as old: a job that still runs writes such a record anew."""
    jobs: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for key in inventory.objects:
        if place := start_of(key):
            jobs[place[0]][place[1]].append(key)
    limit_ns = inventory.now_ns - int(rules.keep_start_days * DAY_S * 1e9)
    old = {
        key
        for key, one in inventory.objects.items()
        if key.startswith(PRELOAD) and one.modified_ns < limit_ns
    }
    for starts in jobs.values():
        by_age = sorted(
            (max(inventory.objects[key].modified_ns for key in keys), name)
            for name, keys in starts.items()
        )
        count = max(0, len(by_age) - rules.keep_starts)
        for number, (newest_ns, name) in enumerate(by_age):
            if number < count or newest_ns < limit_ns:
                old.update(starts[name])
    return old


def _find(inventory: Inventory, text: str) -> str:
    named = inventory.names.get(f"snapshots/names/{text}.json")
    if named is not None:
        text = named
    found = [
        key
        for key, manifest in inventory.snapshots.items()
        if len(text) >= 4 and manifest.fingerprint.startswith(text)
    ]
    if not found and named is not None:
        return manifest_key(named)
    if not found:
        raise NotFoundError(f"there is no snapshot {text} to remove; see `snapshot list`")
    if len(found) > 1:
        raise InvalidInputError(f"{len(found)} snapshots begin with {text}; give more digits")
    return found[0]


def judge_images(inventory: Inventory, rules: Rules) -> dict[str, Verdict]:
    """Key of each image's record -> verdict. Raises: NotFoundError."""
    doomed = set()
    for reference in rules.images:
        candidates = (reference, f"{reference}:latest")
        found = [key for key, one in inventory.images.items() if one.reference in candidates]
        if not found:
            raise NotFoundError(f"there is no image {reference} to remove; see `image list`")
        doomed.update(found)
    return {
        key: Verdict(False, "asked for") if key in doomed else Verdict(True, "not named")
        for key in inventory.images
    }
