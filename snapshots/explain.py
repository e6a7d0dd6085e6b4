"""Explanation of a set-up: its parts, its snapshot, and the nearest snapshot in the store.

Reads machine and store, and changes nothing. Stateless; any thread.
"""

import time

from msgspec import Struct

from bootseer.linux.root_paths import resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.diff import Difference, compare_parts, nearest
from bootseer.snapshots.environment import (
    HELD,
    MOUNTED,
    Decision,
    Known,
    Situation,
    decide,
    held_in_place,
    look_up,
    may_replace,
    mounted_in_place,
    settled_max_age,
)
from bootseer.snapshots.key import Report, SetupRequest, resolve
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.manifest import Manifest
from bootseer.snapshots.scan import base_digest, scan, text_of
from bootseer.store import open_store

IN_PLACE, RESTORE, RUN = "in place", "would restore", "would run"

# Limit for the newest snapshots that are compared, so that an explanation takes about a second.
_COMPARED_MAX = 500


class Explanation(Struct, frozen=True):
    """Outcome of a set-up here and now, and its reasons."""

    outcome: str
    """IN_PLACE, RESTORE or RUN."""
    reason: str
    """The reason in one sentence."""
    fingerprint: str
    targets: tuple[str, ...]
    parts: tuple[Part, ...]
    snapshot: Manifest | None
    """The stored snapshot with this fingerprint."""
    nearest: Manifest | None
    """Snapshot that differs least, if none has this fingerprint."""
    differences: tuple[Difference, ...]
    """Differences between the nearest snapshot and this set-up."""
    unknown: tuple[str, ...]
    """Things that may decide the result and are not among the parts, in a few words each."""
    max_age_s: float
    """Maximum age of a stored snapshot; 0: any age."""


def explain_setup(settings: Settings, request: SetupRequest, report: Report) -> Explanation:
    """Return the outcome that `run_setup` would have now. Changes nothing.

    Raises: as `key.resolve`; UnavailableError, CorruptError, DeadlineError of the store.
    """
    resolved = resolve(request, report)
    max_age_s = settled_max_age(settings.snapshot_max_age_s, is_open=resolved.is_open)
    paths = {target: resolve_in_root(request.root, target) for target in resolved.targets}

    def explained(
        key: str,
        bases: dict[bytes, str],
        decision: Decision,
        manifest: Manifest | None,
        near: Manifest | None = None,
    ) -> Explanation:
        parts = tuple(sorted(resolved.all_parts(bases)))
        outcomes = {Situation.IN_PLACE: IN_PLACE, Situation.STORED: RESTORE}
        return Explanation(
            outcomes.get(decision.situation, RUN),
            decision.reason,
            key,
            tuple(text_of(target) for target in resolved.targets),
            parts,
            manifest,
            near,
            compare_parts(near.parts, parts) if near else (),
            resolved.all_unknown(bases),
            max_age_s,
        )

    outdated = ""
    scans = {}
    with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
        found: tuple[str, dict[bytes, str]] | None = None
        if mounted := mounted_in_place(settings, resolved, paths):
            found = mounted[:2]
        else:
            scans = {target: scan(path) for target, path in paths.items()}
            found = held_in_place(settings, resolved, paths, scans)
        if found is not None:
            key, bases = found
            known = Known(
                catalogue.load(store, key),
                settings.snapshot_max_age_s,
                in_place=MOUNTED if mounted else HELD,
                is_used=not may_replace(settings, request, paths, until_exit=False),
            )
            decision = decide(known, time.time_ns())
            if decision.situation is Situation.IN_PLACE:
                return explained(key, bases, decision, known.manifest)
            outdated = decision.reason
        scans = scans or {target: scan(path) for target, path in paths.items()}
        bases = {target: base_digest(scanned) for target, scanned in scans.items()}
        key = resolved.key(bases)
        known = look_up(store, key, max_age_s)
        decision = decide(known, time.time_ns())
        if decision.situation is not Situation.MISSING:
            return explained(key, bases, decision, known.manifest)
        newest = catalogue.list_newest(store, _COMPARED_MAX)
        near = nearest(resolved.all_parts(bases), (one for one in newest if not one.cache))
    reason = outdated or (decision.reason if near else "the store has no snapshots")
    return explained(key, bases, Decision(Situation.MISSING, reason), None, near)
