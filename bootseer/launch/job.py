"""What `bootseer run` was asked for. Pure."""

import re

from msgspec import Struct

from bootseer.errors import InvalidInputError
from bootseer.launch.checkpoints import CheckpointPath

# What makes a set-up line a script for the shell rather than a plain command.
_SHELL_WORDS = re.compile(r"[.:]|cd|eval|exec|exit|export|set|source|trap|ulimit|umask|unset")
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?\[\]#~=%!{}\n]")


class Job(Struct, frozen=True):
    """What `bootseer run` was asked for."""

    command: tuple[str, ...]
    """Empty: the image's own."""
    image: str = ""
    setups: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    checkpoints: tuple[CheckpointPath, ...] = ()
    runtime: str = "chroot"
    """What starts the command in the image; see `prefetch.container.container.RUNTIMES`."""
    user: str | None = None
    """`USER[:GROUP]` of the image; None: as the image says."""
    entrypoint: str | None = None
    """Instead of the image's; empty: none."""
    binds: tuple[str, ...] = ()
    """`SOURCE:DIRECTORY[:ro]`, as docker has them."""
    kept: tuple[str, ...] = ()
    """Directories that are kept between starts, besides what the settings say."""
    preload: bool = False
    """Whether workers start from a process that has imported what the last start imported."""
    is_standby: bool = False
    """Whether all is prepared for `command`, which a later start runs."""


def setup_command(line: str) -> list[str]:
    """The words of a set-up line; `sh -c LINE` where it needs a shell. Pure.

    Raises: InvalidInputError.
    """
    if _SHELL_SYNTAX.search(line):
        return ["sh", "-c", line]
    import shlex  # here, as others: a start without a set-up needs none of them

    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidInputError(f"the set-up {line!r} cannot be read: {error}") from None
    if not words:
        raise InvalidInputError("a set-up line is empty")
    return ["sh", "-c", line] if _SHELL_WORDS.fullmatch(words[0]) else words
