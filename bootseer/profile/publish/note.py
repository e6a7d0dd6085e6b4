"""Documents of timeline publishing: a launcher's note, and the result of one round.

Imports little, since every start loads this module.
"""

import os
from pathlib import Path

from msgspec import Struct

from bootseer.linux.processes import ProcessId
from bootseer.settings.config import Settings


class LauncherNote(Struct, frozen=True):
    """Description of a launcher of a start, for the attendant."""

    settings: Settings
    """In a note file, the store's URL lacks user, password and query."""
    timeline: Path
    process: ProcessId
    """The launcher, which becomes the job."""
    ready_name: str = ""
    slurm_job: str = ""
    """Number of the Slurm job whose end kills the attendant; empty for none."""
    publishes: bool = True
    """Whether the timeline is to be published."""


class RoundResult(Struct, frozen=True):
    """Result of one round of publishing."""

    sent: dict[str, int] = {}
    """End offset of the lines that the collector has, by kind of records and file."""
    problems: dict[str, str] = {}
    """Failures, by the receiver or step that failed."""


def is_wanted(settings: Settings) -> bool:
    """Return whether timelines of these settings are published anywhere."""
    if is_stored(settings) or settings.metrics_dir is not None:
        return True
    from bootseer.profile.publish.endpoints import endpoints  # here: most starts have a store

    return bool(endpoints(os.environ))


def is_stored(settings: Settings) -> bool:
    """Return whether timelines go to the store. A registry is for images alone."""
    return settings.publish_timelines and not settings.store_url.startswith("oci:")
