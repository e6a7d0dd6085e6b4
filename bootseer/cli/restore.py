"""Restore of a snapshot to the places of its directories.

Loads no click: its import takes a sixth of the time until a snapshot is mounted.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bootseer.cli.grammar import CommandLine
from bootseer.cli.run import config_of
from bootseer.cli.text import human_bytes, say
from bootseer.settings.config import Settings

if TYPE_CHECKING:
    from bootseer.snapshots.manifest import Manifest


def restore_line(line: CommandLine) -> None:
    """Restore as a command line asks for. Raises: as `restore`."""
    options = line.options
    mode = options["mode"]
    done = restore(
        config_of(line).settings,
        line.words[0],
        allows_system=bool(options["allows_system"]),
        mode=None if mode is None else str(mode),
    )
    say_restored(done.file_count, done.content_bytes)


def restore(
    settings: Settings,
    key: str,
    directory: Path | None = None,
    *,
    relocates: bool = False,
    allows_system: bool = False,
    mode: str | None = None,
) -> "Manifest":
    """Restore a snapshot, and return its manifest. Raises: as `restore_snapshot`."""
    from bootseer.snapshots.restore import early_server, restore_snapshot

    # A restore by hand belongs to no start: no node feeds this one.
    settings = replace(settings, fanout=False, restore_mode=mode or settings.restore_mode)
    with contextlib.ExitStack() as stack:
        # The server of a mount begins now, so that it loads while this process does.
        process = None if directory is not None else stack.enter_context(early_server(settings))
        return restore_snapshot(
            settings,
            key,
            directory,
            relocates=relocates,
            allows_system=allows_system,
            report=say,
            process=process,
        )


def say_restored(file_count: int, content_bytes: int) -> None:
    """Print what was restored."""
    say(f"restored {file_count} files, {human_bytes(content_bytes)}")
