"""How old a snapshot is: told by its maker's clock, so a wrong clock makes it older or younger.

Pure but for the clock.
"""

import time

from bootseer.base.shown import shown_age
from bootseer.settings.values import AUTOMATIC_AGE_S
from bootseer.snapshots.catalogue.manifest import Manifest

OPEN_AGE_S = 7 * 86_400.0
"""How old a snapshot may be, unless a setting says otherwise, if its set-up gets something else
once an index has something else. Young enough that a security fix arrives within a week; old enough
that one start a week, and no other, pays for the set-up."""


def settled_max_age(setting_s: float, *, is_open: bool) -> float:
    """How old a stored snapshot may be, 0 for any age, of a set-up whose result may change without
    notice, or not. What is in place on a node has only the limit that the user set: to run pip
    again on top of what satisfies it changes nothing."""
    if setting_s != AUTOMATIC_AGE_S:
        return setting_s
    return OPEN_AGE_S if is_open else 0.0


def is_too_old(manifest: Manifest, max_age_s: float) -> bool:
    """Whether a snapshot is older than `max_age_s`; without a positive one none is."""
    return max_age_s > 0 and time.time_ns() - manifest.created_ns > max_age_s * 1e9


def age_of(manifest: Manifest) -> str:
    """A snapshot's age for people."""
    return shown_age(time.time_ns() - manifest.created_ns)
