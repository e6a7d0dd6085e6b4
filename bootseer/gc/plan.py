"""Plan of a collection, made from an inventory and the user's rules. Pure (no I/O).

Mark and sweep over the graph of the records' links. The roots are records that the rules keep,
objects noted as in use, and objects younger than the grace time; objects reachable from a root
stay. The rest is deleted in the order of the formats, each of which comes before the formats that
it may refer to, so that no record ever refers to a deleted object.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct

from bootseer.gc.inventory import Inventory, Object
from bootseer.gc.retention import RetentionVerdict, Rules, judge, old_members


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


def _is_fresh(inventory: Inventory, one: Object) -> bool:
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
        is_past = found is None or (
            found.format is not None and found.format.fresh_s and not _is_fresh(inventory, found)
        )
        if found is not None and not is_past:
            waiting += ((one, True) for one in found.links.needs)
    return kept


def _below(every: Sequence[str], folder: str) -> Iterator[str]:
    """Yield the keys in a folder, from all keys in order."""
    for at in range(bisect_left(every, folder), len(every)):
        if not every[at].startswith(folder):
            return
        yield every[at]
