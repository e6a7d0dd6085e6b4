"""The kill switch: with BOOTSEER_DISABLE=1 a wrapper is just the command that it was given.

Alone decides what that means. Imports nothing that could be what is broken, reads nothing but the
command line, and so finds the command in it without the parser: a test holds the lists below
against the options that there are.
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

VARIABLE = "BOOTSEER_DISABLE"
_OFF = ("", "0", "off", "no", "false")
# With this value a command that was to run in an image runs on the node itself.
_ON_NODE = "node"

WRAPPERS = {"run": 0, "warm": 1}
"""For each wrapper the number of arguments before the command."""
FLAGS = {
    "": frozenset(("-v", "--verbose")),
    "run": frozenset(("--no-index", "--no-keep", "--no-trace-python", "--preload", "--no-preload")),
    "warm": frozenset(("--record", "--show", "--forget", "--json")),
}
"""The options without a value, of all commands ("") and of each wrapper."""
_ENDS = frozenset(("-h", "--help", "--version"))


class Wrapped(NamedTuple):
    """What the words of a command line ask for."""

    command: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """The wrapper's own."""


def is_disabled(value: str | None) -> bool:
    """Whether this value of the variable throws the switch. Pure."""
    return (value or "").strip().lower() not in _OFF


def wrapped(words: Sequence[str]) -> Wrapped | None:
    """Returns None for words that are no wrapper with a command. Pure."""
    at, options = skip_options(words, 0, FLAGS[""])
    if at >= len(words) or words[at] not in WRAPPERS or _ENDS & {name for name, _ in options}:
        return None
    wrapper = words[at]
    own: list[tuple[str, str]] = []
    for _ in range(WRAPPERS[wrapper] + 1):
        at, options = skip_options(words, at + 1, FLAGS[wrapper])
        own += options
    if at < len(words) and words[at] == "--":
        at += 1
    command = tuple(words[at:])
    return Wrapped(command, tuple(own)) if command and not _ENDS & {n for n, _ in own} else None


def skip_options(
    words: Sequence[str], at: int, flags: frozenset[str]
) -> tuple[int, list[tuple[str, str]]]:
    """Return the index behind the options that begin at `at`, and these with their values. Pure."""
    found: list[tuple[str, str]] = []
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        name, equals, value = words[at].partition("=")
        is_short = not name.startswith("--")
        if equals or name in flags or name in _ENDS or (is_short and name.strip("v") == "-"):
            found.append((name, value))
            at += 1
        else:
            found.append((name, words[at + 1] if at + 1 < len(words) else ""))
            at += 2
    return at, found


def become_command(words: Sequence[str]) -> None:
    """Where the switch is thrown, be the command; returns where it is not, or without a command."""
    value = os.environ.get(VARIABLE)
    found = wrapped(words) if is_disabled(value) else None
    if found is None:
        return
    images = [text for name, text in found.options if name == "--image"]
    if images and value != _ON_NODE:
        _say(
            f"{VARIABLE} is set, and the command is for the image {images[-1]}: start that by "
            f"other means, or set {VARIABLE}={_ON_NODE} to run the command on this node itself"
        )
        os._exit(2)
    left_out = ["the image" for _ in images]
    left_out += ["a set-up" for name, _ in found.options if name == "--setup"]
    left_out += [
        f"the checkpoints on {text.rpartition(':')[2]}"
        for name, text in found.options
        if name == "--checkpoint"
    ]
    _say(f"{VARIABLE} is set: starting the command without {', '.join(left_out) or 'Bootseer'}")
    _execute(found.command)


def _execute(command: Sequence[str]) -> NoReturn:
    # As `launch.signals.hand_over`: Python ignores these from its start on.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        # Scripts that name no interpreter; and exit codes as shells have them.
        from bootseer.errors import SetupFailedError
        from bootseer.linux.scripts import execute

        try:
            execute(command)
        except SetupFailedError as failed:
            _say(str(failed))
            os._exit(failed.exit_code)
        raise AssertionError from error


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # Closed.
        os.write(2, f"bootseer: {sentence}\n".encode("utf-8", "backslashreplace"))
