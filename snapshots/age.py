"""How old a snapshot is: told by its maker's clock, so a wrong clock makes it older or younger.

Pure but for the clock.
"""

import time

from bootseer.snapshots.manifest import Manifest


def is_too_old(manifest: Manifest, max_age_s: float) -> bool:
    """Whether a snapshot is older than `max_age_s`; 0: none is."""
    return bool(max_age_s) and time.time_ns() - manifest.created_ns > max_age_s * 1e9


def age_of(manifest: Manifest) -> str:
    """A snapshot's age for people."""
    return show_age(time.time_ns() - manifest.created_ns)


def show_age(age_ns: int) -> str:
    """A duration for people, in its largest unit: "3 d". What lies in the future is "0 s"."""
    age_s = max(0, age_ns) // 10**9
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s // length_s} {unit}"
    return f"{age_s} s"
