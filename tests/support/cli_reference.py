"""Renders docs/cli.md from the commands: `python -m tests.support.cli_reference`.

tests/docs/test_cli_reference.py fails if the committed file differs.
"""

from collections.abc import Iterator
from typing import Any

import click

from bootseer import errors
from bootseer.cli.command_tree import cli
from bootseer.settings.config import TABLE, short_name
from testbed.paths import REPOSITORY

PATH = REPOSITORY / "docs" / "cli.md"


def root_context(**options: Any) -> click.Context:
    """Return the context of the command line itself.

    A context without its settings would spoil each command's help for the whole process, since
    click caches it.
    """
    return click.Context(cli, info_name="bootseer", **cli.context_settings, **options)


def commands(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield `command` and every command below it, groups before their members."""
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, click.Context(child, info_name=name, parent=context))


def _exit_codes() -> Iterator[str]:
    yield "| code | meaning |"
    yield "|---|---|"
    yield "| 0 | done |"
    for cls, (_, code) in sorted(errors._CODES.items(), key=lambda item: item[1][1]):
        lines = (cls.__doc__ or "").strip().splitlines()
        meaning = "any other failure" if cls is errors.BootseerError else lines[0]
        yield f"| {code} | {meaning} |"
    yield "| 128 + N | ended by signal N |"
    yield ""
    yield "`bootseer run` and `snapshot run` hand through the exit code of their command."


def _settings() -> Iterator[str]:
    yield "| setting | value | default | |"
    yield "|---|---|---|---|"
    for name, one in TABLE.items():
        default = one.default_help or f"`{one.default}`"
        value = one.kind.placeholder.replace("|", "\\|")
        yield f"| `{short_name(name)}` | {value} | {default} | {one.help} |"


def render() -> str:
    """Return the whole reference as Markdown."""
    lines = [
        "# Command line",
        "",
        "Generated from the code (`make docs`); do not edit. Data goes to stdout, progress and",
        "logs to stderr. With `--json` a command prints one JSON document; keys are only added.",
        "",
        "## Exit codes",
        "",
        *_exit_codes(),
        "",
        "## Settings",
        "",
        "Each is a line of `bootseer.toml` and a variable, `BOOTSEER_` and the name in capitals;",
        "some are options, too ([which is stronger](operations.md#settings)).",
        "",
        *_settings(),
        "",
    ]
    root = root_context(max_content_width=88, terminal_width=88)
    for command, context in commands(cli, root):
        context.terminal_width = 88
        lines += [
            f"## {context.command_path}",
            "",
            "```text",
            command.get_help(context).rstrip(),
            "```",
            "",
        ]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
