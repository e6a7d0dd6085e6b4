"""The command line's reference is current, and every command shows an example."""

import click
import pytest

from bootseer.cli import cli
from tests.support.cli_reference import PATH, commands, render, root_context

_ROOT = root_context()
_COMMANDS = list(commands(cli, _ROOT))


def test_the_committed_reference_is_current() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run `make docs`"


@pytest.mark.parametrize(
    "command",
    [command for command, _ in _COMMANDS if not isinstance(command, click.Group)],
    ids=[
        context.command_path
        for command, context in _COMMANDS
        if command is context.command and not isinstance(command, click.Group)
    ],
)
def test_every_command_has_help_and_an_example(command: click.Command) -> None:
    assert command.help
    assert (command.epilog or "").startswith("Example: ")
