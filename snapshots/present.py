"""Whether the targets of a set-up hold its snapshot already. Stateless; any thread."""

from collections.abc import Mapping
from pathlib import Path

from bootseer.snapshots.request import Resolved
from bootseer.snapshots.scan import Scan
from bootseer.snapshots.state import load_state


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
