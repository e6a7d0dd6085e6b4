"""Whether the targets of a set-up hold its snapshot already. Stateless; any thread."""

from collections.abc import Mapping
from pathlib import Path

from bootseer.settings.config import Settings
from bootseer.snapshots.restoring.mounting.mounted import Found, find_mounted
from bootseer.snapshots.setup.request import Resolved
from bootseer.snapshots.targets.scan import Scan, scan
from bootseer.snapshots.targets.state import load_state


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
