"""Preloaders of a start, from their folders to the command that is forked.

The preloaders themselves are in `served.preload`; the records that they follow, in
`launch.import_records`. Main thread only.
"""

import os

from bootseer.errors import BootseerError, InvalidInputError
from bootseer.launch.import_records import fetch_records
from bootseer.launch.job import Job, PreloadHandoff, Say
from bootseer.launch.place import Place
from bootseer.served.preload.launching import (
    PreloaderFolder,
    begin_preloaders,
    make_preloaders,
)
from bootseer.settings.config import Settings

_NAMES = ("preload", "preload-launcher")


class Preloading:
    """Preloaders of this start. A failure is one warning, and workers start ordinarily."""

    def __init__(self, settings: Settings, job: Job, say: Say, *, publishes: bool) -> None:
        self._settings = settings
        self._job = job
        self._say = say
        self._publishes = publishes
        self._folders: list[PreloaderFolder] = []
        self._is_in_image = bool(job.image)

    def show(self, place: Place, *, records: bool) -> None:
        """Make the preloaders' folders, and show them to the job, before the place is entered.

        `records`: whether imports are recorded. Never raises.
        """
        job = self._job
        try:
            if not records:
                raise InvalidInputError("--preload needs recorded imports (trace_python)")
            if job.runtime != "chroot":
                raise InvalidInputError(f"--preload does not work with --runtime {job.runtime}")
            if self._is_in_image and job.is_standby:
                raise InvalidInputError("--preload holds no imports for an image")
            fetch_records(self._settings, in_image=self._is_in_image)
            self._folders = make_preloaders(self._settings, in_image=self._is_in_image)
            for folder, name in zip(self._folders, _NAMES, strict=False):
                folder.shown = place.show_folder(folder.job, name)
        except (BootseerError, OSError) as error:
            self._warn(error)

    def begin(self, place: Place, command: tuple[str, ...]) -> tuple[str, ...]:
        """Begin the preloaders. Return the command, which may change. Never raises.

        Call it after the environments, since the preloaders import from them.
        """
        if not self._folders:
            return command
        try:
            added, command = begin_preloaders(
                self._settings,
                self._folders,
                place.environment(),
                command,
                is_standby=self._job.is_standby,
                enter=place.enter_copy if self._is_in_image else None,
            )
        except (BootseerError, OSError) as error:
            self._warn(error)
        else:
            os.environ.update(added)
        return command

    def handoff(self) -> PreloadHandoff | None:
        """Return what the attendant needs to know about the preloaders; None without any."""
        if not self._folders:
            return None
        return PreloadHandoff(self._folders[0].job, self._is_in_image, self._publishes)

    def _warn(self, error: Exception) -> None:
        self._folders = []
        self._say(f"warning: workers start without a preloader: {error}")
