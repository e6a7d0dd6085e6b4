"""The plan of a collection against an oracle."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.blob.keys import blob_key, index_key
from bootseer.gc.inventory import Inventory, Object
from bootseer.gc.plan import make_plan
from bootseer.gc.retention import DAY_S, Rules
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest import Manifest, Stored, Target
from bootseer.snapshots.setup.fingerprint import Part, fingerprint
from bootseer.store.objects.uses import Use, use_key

DAY_NS = DAY_S * 10**9
_LETTERS = st.sampled_from("abcd")


def _hash(letter: str) -> str:
    return letter * 64


def _synthetic(letters: str, salt: int) -> Manifest:
    parts = (Part("command", "x"), Part("salt", str(salt)))
    targets = tuple(
        Target(
            path=b"/" + letter.encode(),
            whole=True,
            blob=Stored("sha256:" + _hash(letter), 1),
            index=Stored("sha256:" + _hash(letter), 1),
            deletions=(),
            file_count=1,
            content_bytes=1,
        )
        for letter in sorted(set(letters))
    )
    return Manifest(
        fingerprint=fingerprint(parts),
        name="",
        created_ns=salt,
        setup_ns=1,
        node="n",
        version="",
        parts=parts,
        targets=targets,
    )


@given(
    st.lists(st.text(_LETTERS, min_size=1, max_size=3), max_size=6),
    st.dictionaries(_LETTERS, st.sampled_from((1, 2, 5))),
    st.dictionaries(_LETTERS, st.sampled_from((0, 2))),
    st.integers(0, 3),
)
def test_the_plan_keeps_what_is_needed_and_nothing_else(
    snapshots: list[str], used_days: dict[str, int], blob_days: dict[str, int], keep_last: int
) -> None:
    now_ns = 1000 * DAY_NS
    manifests = {
        catalogue.manifest_key(one.fingerprint): one
        for one in (_synthetic(letters, salt) for salt, letters in enumerate(snapshots))
    }
    uses = {
        use_key("sha256:" + _hash(letter)): Use(
            "sha256:" + _hash(letter), ("sha256:" + _hash(letter),)
        )
        for letter in used_days
    }
    objects = {key: Object(10, now_ns - 3 * DAY_NS) for key in manifests}
    for letter, days in used_days.items():
        objects[use_key("sha256:" + _hash(letter))] = Object(1, now_ns - days * DAY_NS)
    for letter in "abcd":
        age = blob_days.get(letter, 2) * DAY_NS
        for key in (blob_key("sha256:" + _hash(letter)), index_key("sha256:" + _hash(letter))):
            objects[key] = Object(100, now_ns - age)
    inventory = Inventory(objects, manifests, {}, {}, {}, {}, {}, {}, uses, now_ns)
    plan = make_plan(inventory, Rules(keep_last=keep_last))

    in_use = {letter for letter, days in used_days.items() if days < 3}
    groups: dict[str, list[tuple[int, str]]] = {}
    for salt, letters in enumerate(snapshots):
        groups.setdefault("".join(sorted(set(letters))), []).append((salt, letters))
    kept = {
        salt
        for group in groups.values()
        for place, (salt, letters) in enumerate(sorted(group, reverse=True))
        if place < keep_last or in_use & set(letters)
    }
    needed = in_use.union(*(snapshots[salt] for salt in kept))
    needed |= {letter for letter in "abcd" if blob_days.get(letter, 2) < 1}
    expected = {
        key
        for letter in set("abcd") - needed
        for key in (blob_key("sha256:" + _hash(letter)), index_key("sha256:" + _hash(letter)))
    }
    gone = set(plan.deletions)
    assert {key for key in gone if key.startswith(("blobs/", "indexes/"))} == expected
    assert {salt for salt, key in enumerate(manifests) if key not in gone} == kept
    # Records before what they name.
    order = [key.partition("/")[0] for key in plan.deletions]
    assert order == sorted(order, key=["snapshots", "used", "indexes", "blobs"].index)


def _cache(letter: str, made_days: float, used_days: float | None) -> tuple[Inventory, str]:
    made = _synthetic(letter, 1)
    parts = (Part("cache", "X_CACHE_DIR"), Part("folder", letter))
    manifest = replace(made, parts=parts, fingerprint=fingerprint(parts))
    now_ns, index = 1000 * DAY_NS, manifest.targets[0].index.digest
    key = catalogue.manifest_key(manifest.fingerprint)
    made_ns = now_ns - int(made_days * DAY_NS)
    objects = {
        one: Object(1, made_ns)
        for one in (key, blob_key(manifest.targets[0].blob.digest), index_key(index))
    }
    uses = {}
    if used_days is not None:
        uses[use_key(index)] = Use(index, (manifest.targets[0].blob.digest,))
        objects[use_key(index)] = Object(1, now_ns - int(used_days * DAY_NS))
    names = ("names", "images", "layers", "chains", "pointers", "similar_images")
    nothing: dict[str, Any] = {name: {} for name in names}
    inventory = Inventory(
        objects=objects, snapshots={key: manifest}, uses=uses, now_ns=now_ns, **nothing
    )
    return inventory, key


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
    inventory, key = _cache("a", made_days, used_days)
    plan = make_plan(inventory, rules)
    assert plan.snapshots[key].is_kept is is_kept
    assert (set(plan.deletions) == set(inventory.objects)) is not is_kept
