"""Kinds of commands: groups, and those that wrap another one.

Some commands of a group are in other modules, loaded when one of them is used: a start of a job
waits for all that its command loads.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import click

from bootseer.base.shown import nearest


class LazyGroup(click.Group):
    """A group whose commands may lie in modules of their own.

    `elsewhere`: of each command that is not added the module in `bootseer.cli` that has it, and its
    name there.
    """

    def __init__(
        self,
        *args: Any,
        elsewhere: Mapping[str, tuple[str, str]] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        self._elsewhere = elsewhere or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*self.commands, *self._elsewhere))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._elsewhere:
            return super().get_command(ctx, cmd_name)
        module, name = self._elsewhere[cmd_name]
        command = getattr(importlib.import_module(f"bootseer.cli.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = nearest(args[0], self.list_commands(ctx))
            hint = f" Did you mean {close!r}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


class WrappingCommand(click.Command):
    """One that takes another command behind `--`, as its parameter `command`.

    `has_own`: an option that brings a command of its own, such as an image.
    """

    def __init__(
        self, *args: Any, needs_command: bool = True, has_own: str = "", **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self._needs_command = needs_command
        self._has_own = has_own

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        needs = self._needs_command and not self._has_own
        piece = "-- COMMAND..." if needs else "[-- COMMAND...]"
        return [*super().collect_usage_pieces(ctx), piece]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        command = tuple(args[end + 1 :])
        hint = f"put -- before COMMAND: {ctx.command_path} ... -- COMMAND"
        try:
            rest = super().parse_args(ctx, args[:end])
        except click.NoSuchOption as error:
            if end == len(args):
                raise click.UsageError(
                    f"No such option: {error.option_name}. If it belongs to COMMAND, {hint} "
                    f"{error.option_name}",
                    ctx,
                ) from error
            raise
        except click.UsageError as error:
            if end == len(args) and "unexpected extra argument" in error.message:
                raise click.UsageError(f"{error.message}. If it is COMMAND, {hint}", ctx) from error
            raise
        needs = self._needs_command and not ctx.params.get(self._has_own)
        if needs and not command and not ctx.resilient_parsing:
            raise click.UsageError(f"Missing COMMAND: {hint}", ctx)
        ctx.params["command"] = command
        return rest
