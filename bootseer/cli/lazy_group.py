"""A group of commands of which some are in other modules, loaded when one of them is used: a start
of a job waits for all that its command loads.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """`elsewhere`: of each command that is not added the module in `bootseer.cli` that has it, and
    its name there."""

    def __init__(self, *args: Any, elsewhere: Mapping[str, tuple[str, str]], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*self.commands, *self._elsewhere))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._elsewhere:
            return super().get_command(ctx, cmd_name)
        module, name = self._elsewhere[cmd_name]
        command = getattr(importlib.import_module(f"bootseer.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command
