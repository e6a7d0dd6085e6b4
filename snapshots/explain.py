"""Explanation of a set-up: its parts, its snapshot, and the nearest snapshot in the store.

Reads machine and store, and changes nothing. Stateless; any thread.
"""

from msgspec import Struct
from msgspec.structs import replace

from bootseer.linux.root_paths import resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.diff import Difference, compare_parts, nearest
from bootseer.snapshots.environment import (
    age_of,
    is_too_old,
    key_in_place,
    mounts_in_place,
    settled_max_age,
)
from bootseer.snapshots.key import Report, Request, Resolved, resolve
from bootseer.snapshots.manifest import Manifest
from bootseer.snapshots.parts import Part, base_part_name
from bootseer.snapshots.scan import NOTHING, base_digest, scan, text_of
from bootseer.store import open_store

IN_PLACE, RESTORE, RUN = "in place", "would restore", "would run"
# Of the newest: an explanation should take a second, whatever the store holds.
_COMPARED_MAX = 500


class Explanation(Struct, frozen=True):
    """What a set-up would do here and now."""

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
    """The snapshot that differs least, where none has this fingerprint."""
    differences: tuple[Difference, ...]
    """Differences between the nearest snapshot and this set-up."""
    unknown: tuple[str, ...] = ()
    """What may decide the result and is not among the parts, in a few words each."""
    max_age_s: float = 0.0
    """How old a stored snapshot may be; 0: any age."""


def explain_setup(settings: Settings, request: Request, report: Report) -> Explanation:
    """What `run_setup` would do now. Changes nothing.

    Raises: as `key.resolve`; UnavailableError, CorruptError, DeadlineError of the store.
    """
    resolved = resolve(request, report)
    max_age_s = settled_max_age(settings.snapshot_max_age_s, is_open=resolved.is_open)
    found = _explain(settings, request, resolved, max_age_s)
    filled = {
        target: next((p.value for p in found.parts if p.name == base_part_name(target)), NOTHING)
        for target in resolved.targets
    }
    return replace(found, unknown=resolved.all_unknown(filled), max_age_s=max_age_s)


def _explain(
    settings: Settings, request: Request, resolved: Resolved, max_age_s: float
) -> Explanation:
    targets = tuple(text_of(target) for target in resolved.targets)
    paths = {target: resolve_in_root(request.root, target) for target in resolved.targets}
    outdated = ""
    mounted = mounts_in_place(settings, resolved, paths)
    if mounted is not None:
        with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
            manifest = catalogue.load(store, mounted[0])
        if manifest is None or not is_too_old(manifest, settings.snapshot_max_age_s):
            parts = manifest.parts if manifest else resolved.parts
            reason = "it is mounted on the targets"
            return Explanation(IN_PLACE, reason, mounted[0], targets, parts, manifest, None, ())
        outdated = _outdated("what is mounted on the targets", manifest)
    scans = {target: scan(path) for target, path in paths.items()}
    bases = {target: base_digest(scanned) for target, scanned in scans.items()}
    found = key_in_place(settings.cache_dir, resolved, paths, scans)
    with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
        if found is not None:
            key, bases = found
            manifest = catalogue.load(store, key)
            if manifest is None or not is_too_old(manifest, settings.snapshot_max_age_s):
                parts = tuple(sorted(resolved.all_parts(bases)))
                reason = "the targets hold it, untouched since it was put there"
                return Explanation(IN_PLACE, reason, key, targets, parts, manifest, None, ())
            outdated = _outdated("what the targets hold", manifest)
            bases = {target: base_digest(scanned) for target, scanned in scans.items()}
        key = resolved.key(bases)
        parts = tuple(sorted(resolved.all_parts(bases)))
        manifest = catalogue.load(store, key)
        if manifest is not None:
            if is_too_old(manifest, max_age_s):
                reason = _outdated("its snapshot", manifest)
                return Explanation(RUN, reason, key, targets, parts, manifest, None, ())
            age = age_of(manifest)
            reason = f"its snapshot was made {age} ago by {manifest.node}"
            return Explanation(RESTORE, reason, key, targets, parts, manifest, None, ())
        newest = catalogue.list_newest(store, _COMPARED_MAX)
        near = nearest(parts, (one for one in newest if not one.cache))
    differences = compare_parts(near.parts, parts) if near else ()
    reason = "there is no snapshot of it" if near else "the store has no snapshots"
    return Explanation(RUN, outdated or reason, key, targets, parts, None, near, differences)


def _outdated(what: str, manifest: Manifest) -> str:
    age = age_of(manifest)
    return f"{what} was made {age} ago, which is beyond the maximum age"
