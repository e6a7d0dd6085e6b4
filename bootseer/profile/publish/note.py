"""Notes of launchers whose timelines are published, and what one round of that has done.

Light, since every start loads it.
"""

import os
from pathlib import Path

from msgspec import Struct

from bootseer.linux.processes import ProcessId
from bootseer.profile.publish.endpoints import endpoints
from bootseer.settings.config import Settings


class Note(Struct, frozen=True):
    """A launcher of a start, as it describes itself."""

    settings: Settings
    """In a file without user, password and query of the store's URL."""
    timeline: Path
    process: ProcessId
    """The launcher, and the job that it becomes."""
    ready_name: str = ""
    slurm_job: str = ""
    """The job of Slurm whose end kills the process that publishes."""
    publishes: bool = True
    """Whether the timeline is wanted anywhere."""


class Round(Struct, frozen=True):
    """What one round of publishing has done."""

    sent: dict[str, int] = {}
    """How much of each file the collector has."""
    problems: dict[str, str] = {}
    """What went wrong, by who it went wrong with."""


def is_wanted(settings: Settings) -> bool:
    """Return whether timelines of these settings are published anywhere."""
    return is_stored(settings) or settings.metrics_dir is not None or bool(endpoints(os.environ))


def is_stored(settings: Settings) -> bool:
    """Return whether timelines go to the store. What lies beside an image in a registry is no place
    for what each start adds."""
    return settings.publish_timelines and not settings.store_url.startswith("oci:")
