"""docs/cli.md is current, and every command's help has an example."""

import click

from bootseer.cli.command_tree import cli
from tests.support import json_reference
from tests.support.cli_reference import PATH, commands, render, root_context


def test_the_committed_reference_is_current() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_the_committed_page_of_json_is_current() -> None:
    committed = json_reference.PATH.read_text(encoding="utf-8")
    assert committed == json_reference.render(), "run `make docs`"


def test_every_command_has_help_and_an_example() -> None:
    assert [
        context.command_path
        for command, context in commands(cli, root_context())
        if not isinstance(command, click.Group)
        and not (command.help and (command.epilog or "").startswith("Example: "))
    ] == []
