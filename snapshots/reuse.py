"""The ways in which a set-up need not run: its snapshot is mounted, in place, or in the store.

Alone decides what of that is used. The caller holds the locks of the targets.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from bootseer.errors import BootseerError, CorruptError, SetupFailedError
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.linux.mount_table import mount_points
from bootseer.linux.removal import empty_directory
from bootseer.settings.config import Settings
from bootseer.snapshots.attempt import Attempt, SetupResult
from bootseer.snapshots.capture.layered_scan import scan_before
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.age import age_of, is_too_old
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.snapshots.restoring.mounting.mounted import (
    Found,
    drop_damaged,
    find_mounted,
    keep_mounted,
)
from bootseer.snapshots.restoring.restore import place
from bootseer.snapshots.restoring.restore_modes import Wish, restore_by_choice
from bootseer.snapshots.setup.request import Resolved
from bootseer.snapshots.targets.scan import Scan, scan
from bootseer.snapshots.targets.state import load_state
from bootseer.snapshots.targets.target_users import other_users
from bootseer.store import Store


def keep_mount(attempt: Attempt, store: Store, resolved: Resolved) -> SetupResult | None:
    """What is mounted on the targets, if it is what was asked for: nothing is scanned then."""
    found = mounts_in_place(attempt.settings, resolved, attempt.paths)
    if found is None:
        return None
    attempt.key, mounts = found
    if drop_damaged(attempt.settings, mounts):
        attempt.report(
            f"warning: snapshot {attempt.key[:12]}, which is mounted, is damaged in the store; "
            "it is restored anew"
        )
        return None
    if _is_outdated(attempt, store) or not keep_mounted(
        attempt.settings, mounts, until_exit=attempt.until_exit
    ):
        return None
    attempt.report(f"snapshot {attempt.key[:12]} is mounted already")
    result = attempt.result("in place", file_count=sum(one.record.file_count for one in mounts))
    return replace(
        result,
        mode=mounts[0].record.mode,
        mode_reason="it was mounted",
        ready_names=tuple(filter(None, (one.record.ready_name for one in mounts))),
    )


def keep_in_place(
    attempt: Attempt, store: Store, resolved: Resolved, before: Mapping[bytes, Scan]
) -> SetupResult | None:
    """What the targets hold, untouched, if it is what was asked for."""
    found = key_in_place(attempt.settings.cache_dir, resolved, attempt.paths, before)
    if found is None:
        return None
    attempt.key = found[0]
    if _is_outdated(attempt, store):
        return None
    attempt.report(f"snapshot {attempt.key[:12]} is in place already")
    # Targets themselves do not count, as in manifests.
    count = sum(len(scanned) - 1 for scanned in before.values() if scanned)
    return attempt.result("in place", file_count=count)


def _is_outdated(attempt: Attempt, store: Store) -> bool:
    """Whether the snapshot in place is too old by now."""
    max_age_s = attempt.settings.snapshot_max_age_s
    if max_age_s <= 0:
        return False
    try:
        manifest = catalogue.load(store, attempt.key)
    except BootseerError as error:
        # What is here is what was asked for; that it may be too old is no reason to fail.
        attempt.report(f"warning: cannot tell how old the snapshot in place is: {error}")
        return False
    if manifest is None or not is_too_old(manifest, max_age_s):
        return False
    age = age_of(manifest)
    attempt.report(f"snapshot {attempt.key[:12]}, which is in place, is {age} old")
    if not _may_replace(attempt):
        attempt.report("it is used as it is: another job on this node runs on it")
        return False
    return True


def _may_replace(attempt: Attempt) -> bool:
    """Whether what is in place can be made anew without changing it for another job."""
    if attempt.request.root != Path("/") or (attempt.until_exit and can_mount_directly()):
        return True
    return not other_users(attempt.settings.run_dir, attempt.paths.values())


def restore_instead(
    attempt: Attempt,
    store: Store,
    manifest: Manifest,
    before: Mapping[bytes, Scan],
    bases: Mapping[bytes, str],
    error: SetupFailedError,
) -> SetupResult:
    """Put a stored snapshot on the targets, though it is old, since the set-up that was to replace
    it has failed. What that left where nothing was (`before`) is removed.

    Raises: `error` where the targets cannot be made as they were; as `restore_by_choice`.
    """
    for target, path in attempt.paths.items():
        if not _made_as_before(attempt, path, before[target]):
            raise error
    attempt.report(
        f"warning: {error}; snapshot {attempt.key[:12]} is used once more, though it is "
        f"{age_of(manifest)} old"
    )
    attempt.process = None  # ended before the set-up
    return restore_stored(attempt, store, manifest, bases)


def _made_as_before(attempt: Attempt, path: Path, before: Scan) -> bool:
    if scan_before(attempt.request.layers, path) == before:
        return True
    inside = os.fsencode(path) + b"/"
    if len(before) > 1 or any(one.path.startswith(inside) for one in mount_points()):
        return False
    try:
        empty_directory(path)
    except OSError:
        return False
    return True


def restore_stored(
    attempt: Attempt, store: Store, manifest: Manifest, bases: Mapping[bytes, str]
) -> SetupResult:
    """Put the stored snapshot on the targets. Raises: as `restore_by_choice`."""
    placed = place(manifest, attempt.request.root)
    if any(item.target.path not in attempt.paths for item in placed):
        raise CorruptError(f"snapshot {attempt.key[:12]} holds targets that were not asked for")
    catalogue.note_used(store, manifest)
    wish = Wish(
        attempt.settings.restore_mode,
        until_exit=attempt.until_exit,
        is_container=attempt.request.root != Path("/"),
        scratch=attempt.request.scratch,
        process=attempt.process,
    )
    done = restore_by_choice(
        attempt.settings,
        store,
        manifest,
        placed,
        bases,
        wish,
        on_finished=attempt.note,
        report=attempt.report,
    )
    # Targets that the set-up did not make: known to be missing.
    for target in bases.keys() - {item.target.path for item in placed}:
        attempt.note(attempt.paths[target], attempt.key, bases[target], "")
    result = attempt.result(
        "restored",
        file_count=manifest.file_count,
        content_bytes=manifest.content_bytes,
        moved_bytes=done.moved_bytes,
        setup_s=manifest.setup_ns / 1e9,
        changed_outside=manifest.outside.paths,
    )
    waited = f"; waited {attempt.waited_s:.1f} s for it" if attempt.waited_s else ""
    attempt.report(
        f"restored snapshot {attempt.key[:12]}: {result.file_count} files in "
        f"{result.seconds - attempt.waited_s:.1f} s instead of {result.setup_seconds:.1f} s, "
        f"{done.choice.sentence()}{waited}"
    )
    if sentence := manifest.outside.restored_sentence(manifest.node):
        attempt.report(f"warning: {sentence}")
    return replace(
        result,
        mode=done.choice.mode,
        mode_reason=done.choice.reason,
        ready_names=done.ready_names,
        was_here=done.was_here,
    )


def key_in_place(
    cache_dir: Path,
    resolved: Resolved,
    paths: Mapping[bytes, Path],
    scans: Mapping[bytes, Scan],
) -> tuple[str, dict[bytes, str]] | None:
    """The set-up's fingerprint and what was in its targets before, if all of them (`paths` on
    this host, found to hold `scans`) hold that snapshot, untouched since; else None."""
    states = [load_state(cache_dir, paths[target], scans[target]) for target in resolved.targets]
    known = [state for state in states if state is not None]
    if len(known) < len(resolved.targets):
        return None
    bases = {target: state.base for target, state in zip(resolved.targets, known, strict=True)}
    key = resolved.key(bases)
    return (key, bases) if {state.fingerprint for state in known} == {key} else None


def mounts_in_place(
    settings: Settings, resolved: Resolved, paths: Mapping[bytes, Path]
) -> tuple[str, list[Found]] | None:
    """`key_in_place` for snapshots that are mounted: the fingerprint and the mounts. Nothing in
    them is looked at. Raises: BootseerError."""
    mounts: list[Found] = []
    bases: dict[bytes, str] = {}
    fingerprints = set()
    others = []
    for target in resolved.targets:
        found = find_mounted(settings, paths[target])
        if found is None:
            others.append(target)
            continue
        mounts.append(found)
        bases[target] = found.record.base
        fingerprints.add(found.record.fingerprint)
    if not mounts:
        return None
    for target in others:
        # The set-up has made nothing here.
        state = load_state(settings.cache_dir, paths[target], scan(paths[target]))
        if state is None:
            return None
        bases[target] = state.base
        fingerprints.add(state.fingerprint)
    key = resolved.key(bases)
    return (key, mounts) if fingerprints == {key} else None
