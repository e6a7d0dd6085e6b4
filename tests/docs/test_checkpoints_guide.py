"""The commands of docs/checkpoints.md exist; tests/fuse/formats runs its programs."""

import re
from pathlib import Path

import pytest

from bootseer.cli.command_tree import cli
from tests.support.cli_reference import root_context

PAGE = (Path(__file__).parent.parent.parent / "docs/checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line", re.findall(r"^    bootseer (checkpoint (?!mount|unmount).*)$", PAGE, re.MULTILINE)
)
def test_the_guides_commands_exist(line: str) -> None:
    group, name, *arguments = line.split()
    context = root_context()
    checkpoint = cli.get_command(context, group)
    command = checkpoint.get_command(context, name)  # type: ignore[union-attr]
    assert command is not None
    command.make_context(name, arguments, parent=context)
