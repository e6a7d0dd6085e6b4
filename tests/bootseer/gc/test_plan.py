"""The plan of a collection against a reference model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.gc.inventory import Inventory, StoredObject
from bootseer.gc.plan import DAY_S, Rules, make_plan, stages
from bootseer.store.objects.records import Links, ObjectFormat, RecordEntry
from bootseer.store.objects.uses import use_key

DAY_NS = DAY_S * 10**9
NOW_NS = 1000 * DAY_NS
RECORDS, NOTES, STARTS, CONTENT = FORMATS = (
    ObjectFormat("records/"),
    ObjectFormat("used/", fresh_s=3 * DAY_S),
    ObjectFormat("starts/", series=lambda key: ("job", key)),
    ObjectFormat("content/", is_content=True),
)
NAMES = "abcd"
CONTENT_KEYS = [f"content/{folder}/{name}" for folder in "xy" for name in NAMES]
_ANY_CONTENT = st.lists(st.sampled_from([*CONTENT_KEYS, "content/x/", "content/none"]), max_size=2)
_ANY_RECORD = st.lists(st.sampled_from([f"records/{name}" for name in NAMES]), max_size=2)
_AGE_DAYS = st.sampled_from((0.5, 2, 5))


@st.composite
def _objects(draw: st.DrawFn) -> dict[str, StoredObject]:
    found = {}

    def add(key: str, of: ObjectFormat | None, links: Links) -> None:
        found[key] = StoredObject(1, NOW_NS - int(draw(_AGE_DAYS) * DAY_NS), of, links)

    for name in draw(st.sets(st.sampled_from(NAMES))):
        needs = (*draw(_ANY_CONTENT), *draw(_ANY_RECORD))
        entry = RecordEntry("snapshot", name * 64, group=name) if draw(st.booleans()) else None
        hangs_on = () if entry else tuple(draw(_ANY_RECORD))
        links = Links(needs, tuple(draw(_ANY_CONTENT)), hangs_on, "", entry)
        add(f"records/{name}", RECORDS, links)
    for name in draw(st.sets(st.sampled_from(NAMES))):
        needs = tuple(draw(_ANY_CONTENT))
        add(
            f"used/{name}",
            NOTES,
            Links(needs, hangs_on=tuple(one for one in needs if one[-1] != "/")),
        )
    for name in draw(st.sets(st.sampled_from(NAMES))):
        add(f"starts/{name}", STARTS, Links())
    for key in draw(st.sets(st.sampled_from(CONTENT_KEYS))):
        add(key, CONTENT, Links())
    add("theirs/x", None, Links())
    return found


def _kept(objects: dict[str, StoredObject], doomed: set[str]) -> set[str]:
    """Return the objects that stay, by the steps that docs/format/store.md describes."""
    by_age = sorted((one.modified_ns, key) for key, one in objects.items() if "starts/" in key)
    kept: set[str] = set()
    for key, one in objects.items():
        age_days = (NOW_NS - one.modified_ns) / DAY_NS
        is_doomed = key in doomed or (one.links.hangs_on and doomed >= set(one.links.hangs_on))
        if (
            (age_days < 1 and not is_doomed)
            or (one.links.entry and key not in doomed)
            or (key.startswith("used/") and age_days < 3)
            or key.startswith("theirs/")
            or key in [key for _, key in by_age[-2:]]
        ):
            kept.add(key)

    def below(keys: tuple[str, ...]) -> set[str]:
        folders = tuple(key for key in keys if key.endswith("/"))
        # Other objects may still refer to one that is missing.
        return {*keys, *(key for key in objects if folders and key.startswith(folders))}

    needed: set[str] = set()
    while True:
        before = len(kept), len(needed)
        for key in kept & set(objects):
            one = objects[key]
            if not (key.startswith("used/") and NOW_NS - one.modified_ns >= 3 * DAY_NS):
                needed |= below(one.links.needs)
        for key in needed & set(objects):
            needed |= below(objects[key].links.lends)
        kept |= needed
        kept |= {key for key, one in objects.items() if kept.intersection(one.links.hangs_on)}
        if before == (len(kept), len(needed)):
            return kept


@given(_objects(), st.sets(st.sampled_from(NAMES)))
def test_the_plan_keeps_what_is_needed_and_nothing_else(
    objects: dict[str, StoredObject], removed: set[str]
) -> None:
    entries = {key for key, one in objects.items() if one.links.entry is not None}
    doomed = {key for key in entries if key[-1] in removed}
    rules = Rules(snapshots=tuple(key[-1] * 8 for key in doomed), keep_starts=2)
    inventory = Inventory(objects, FORMATS, NOW_NS)
    plan = make_plan(inventory, rules)
    assert set(plan.deletions) == set(objects) - _kept(objects, doomed)
    assert plan.freed_bytes == len(plan.deletions)
    # Records before what they name; of each kind all at once.
    order = [key.partition("/")[0] for key in plan.deletions]
    assert order == sorted(order, key=["records", "used", "starts", "content"].index)
    assert len(list(stages(inventory, plan.deletions))) == len(set(order))


@pytest.mark.parametrize(
    ("made_days", "used_days", "rules", "is_kept"),
    [
        (100, 10, Rules(), True),
        (10, None, Rules(), True),
        (100, 40, Rules(), False),
        (100, None, Rules(), False),
        (100, 40, Rules(keep_days=60), True),
        # The newest of many snapshots stays, but of a cache there is one generation only.
        (100, 40, Rules(keep_last=1), False),
    ],
)
def test_a_cache_that_nobody_used_for_a_month_goes(
    made_days: float, used_days: float | None, rules: Rules, is_kept: bool
) -> None:
    entry = RecordEntry("snapshot", "a" * 64, trees=("sha256:x",), is_cache=True)
    ages = {"records/a": (made_days, Links(("content/x/a",), entry=entry))}
    ages["content/x/a"] = (made_days, Links())
    if used_days is not None:
        ages[use_key("sha256:x")] = (used_days, Links(hangs_on=("content/x/a",)))
    objects = {
        key: StoredObject(
            1,
            NOW_NS - int(days * DAY_NS),
            next(one for one in FORMATS if one.fits(key)),
            links,
        )
        for key, (days, links) in ages.items()
    }
    plan = make_plan(Inventory(objects, FORMATS, NOW_NS), rules)
    assert plan.verdicts["records/a"].is_kept is is_kept
    assert (set(plan.deletions) == set(objects)) is not is_kept
