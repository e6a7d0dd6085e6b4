"""Kill switch: with BOOTSEER_DISABLE=1 a wrapper only starts the command behind its `--`.

No other module decides when the switch is on, or what happens then. The module imports `grammar`
alone, so that nothing that may be broken is loaded.
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from bootseer.cli.grammar import WRAPPERS, behind_settings

VARIABLE = "BOOTSEER_DISABLE"
_OFF = ("", "0", "off", "no", "false")
# With this value a command that was to run in an image runs on the node itself.
_ON_NODE = "node"
_NAMED_IN_WARNING = ("--image", "--setup", "--checkpoint")


def is_disabled(value: str | None) -> bool:
    """Return whether this value of the variable turns Bootseer off. Pure."""
    return (value or "").strip().lower() not in _OFF


def become_command(words: Sequence[str]) -> None:
    """Become the command of `run` or `warm` if the switch is on; else return."""
    value = os.environ.get(VARIABLE)
    if not is_disabled(value):
        return
    end = list(words).index("--") if "--" in words else len(words)
    ours, command = behind_settings(words[:end]), words[end + 1 :]
    if not ours or ours[0] not in WRAPPERS or {"-h", "--help"} & set(ours):
        return
    names = {word.partition("=")[0] for word in ours}
    # Without a command on the line, the command is the image's own.
    if "--image" in names and (value != _ON_NODE or not command):
        _print_message(
            f"{VARIABLE} is set, and the command is for an image (--image): start that by other "
            f"means, or set {VARIABLE}={_ON_NODE} to run one behind -- on this node itself"
        )
        os._exit(2)
    if not command:
        return
    left_out = ", ".join(name for name in _NAMED_IN_WARNING if name in names)
    _print_message(f"{VARIABLE} is set: starting the command without {left_out or 'Bootseer'}")
    _execute(command)


def _execute(command: Sequence[str]) -> NoReturn:
    # As in `launch.signals.hand_over`: Python ignores these signals, and exec would keep that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        # `execute` also starts scripts without an interpreter line, and has the exit codes of
        # shells.
        from bootseer.errors import SetupFailedError
        from bootseer.linux.scripts import execute

        try:
            execute(command)
        except SetupFailedError as failed:
            _print_message(str(failed))
            os._exit(failed.exit_code)
        raise AssertionError from error


def _print_message(sentence: str) -> None:
    with contextlib.suppress(OSError):  # Closed.
        os.write(2, f"bootseer: {sentence}\n".encode("utf-8", "backslashreplace"))
