"""The `Job`: everything that `bootseer run` was asked to do. Pure."""

import re
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError
from bootseer.launch.checkpoints import CheckpointPath

Say = Callable[[str], None]
"""Shows one sentence to people."""

# A set-up line with one of these as first word, or with such a character, needs a shell.
_SHELL_WORDS = r"[.:]|cd|eval|exec|exit|export|set|source|trap|ulimit|umask|unset"
_SHELL_SYNTAX = r"[|&;<>()$`*?\[\]#~=%!{}\n]"


class Job(Struct, frozen=True):
    """A job as the options of `bootseer run` describe it."""

    command: tuple[str, ...]
    """Command and arguments; empty: the image's own command."""
    image: str = ""
    setups: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    checkpoints: tuple[CheckpointPath, ...] = ()
    runtime: str = "chroot"
    """Runtime that starts the command in the image; see `prefetch.container.container.CHROOT`."""
    user: str | None = None
    """User in the image, as `USER[:GROUP]`; None: the user that the image names."""
    entrypoint: str | None = None
    """Replacement for the image's entrypoint; empty: no entrypoint; None: the image's."""
    binds: tuple[str, ...] = ()
    """Directories of the host in the container, as `SOURCE:DIRECTORY[:ro]` like docker's."""
    kept: tuple[str, ...] = ()
    """Directories to keep between starts, beside those that the settings name."""
    preload: bool = False
    """Whether workers are forked from a process that has done the imports of the last start."""
    is_standby: bool = False
    """Whether everything is prepared for `command`, but a later start runs it."""


class PreloadHandoff(Struct, frozen=True):
    """Preloading of a start, as the start tells its attendant."""

    job_folder: Path
    """Folder to which the job's processes write import records if the job is in an image."""
    is_in_image: bool = False
    publishes: bool = False
    """Whether the records are published."""


def setup_command(line: str) -> list[str]:
    """Return the words of a set-up line, or `sh -c LINE`. Pure. Raises: InvalidInputError."""
    if re.search(_SHELL_SYNTAX, line):
        return ["sh", "-c", line]
    import shlex  # here, since a start without a set-up does not need it

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidInputError(f"the set-up {line!r} cannot be parsed: {error}") from None
    if not words:
        raise InvalidInputError("a set-up line is empty")
    return ["sh", "-c", line] if re.fullmatch(_SHELL_WORDS, words[0]) else words
