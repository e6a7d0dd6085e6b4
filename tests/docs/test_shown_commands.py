"""The commands of Bootseer that the README and the docs show exist, with their options."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from bootseer.cli.command_tree import cli
from testbed.paths import REPOSITORY
from tests.support.cli_reference import root_context

# docs/cli.md is generated from the commands.
PAGES = [
    REPOSITORY / "README.md",
    *sorted({*(REPOSITORY / "docs").rglob("*.md")} - {REPOSITORY / "docs/cli.md"}),
]
# Words that may stand before a command: a prompt, variables, a launcher.
_COMMAND = re.compile(r"^[$ ]*(?:\w+=\S+ |exec |srun (?:--\S+ )*)*bootseer (.*)")


def _shown(text: str) -> Iterator[str]:
    blocks = re.findall(r"^```(?:sh|bash|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks.append("".join(re.findall(r"^    (.*\n)", text, re.MULTILINE)))
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if match := _COMMAND.match(line):
                yield match[1]


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        # For a quoted script of several lines: the part before it.
        words = shlex.split(line.rpartition("'")[0])
    return list(itertools.takewhile(lambda word: word not in ("&&", "||", "|", ";", "&"), words))


def _found(line: str, words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """Return the command, its context and its arguments. Raises: click.UsageError."""
    command: click.Command = cli
    context = root_context()
    while isinstance(command, click.Group) and words:
        child = command.get_command(context, words[0])
        if child is None:
            raise click.UsageError("there is no such command")
        if isinstance(child, click.Group):
            context = click.Context(child, info_name=words[0], parent=context)
        command, words = child, words[1:]
    return command, context, words


def test_commands_in_blocks() -> None:
    assert [line for page in PAGES for line in _wrong_in_blocks(page)] == []


def _wrong_in_blocks(page: Path) -> Iterator[str]:
    for line in _shown(page.read_text(encoding="utf-8")):
        try:
            command, context, words = _found(line, _words(line))
            # The commands are parsed, not run.
            command.make_context(command.name, words, parent=context)
        except click.UsageError as error:
            yield f"{page.name}: bootseer {line}: {error.format_message()}"


def test_commands_in_sentences() -> None:
    assert [line for page in PAGES for line in _wrong_in_sentences(page)] == []


def _wrong_in_sentences(page: Path) -> Iterator[str]:
    """Yield the wrong commands in sentences, which may leave out arguments."""
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"(?<![`\w])`bootseer ([a-z][^`\\]*)`", text):
        try:
            command, _, words = _found(line, _words(line))
        except click.UsageError as error:
            yield f"{page.name}: bootseer {line}: {error.format_message()}"
            continue
        known = {name for option in command.params for name in option.opts}
        words = list(itertools.takewhile(lambda word: word != "--", words))
        unknown = {word for word in words if word.startswith("-")} - known
        if unknown:
            yield f"{page.name}: bootseer {line}: there is no {', '.join(sorted(unknown))}"


def test_there_are_commands_to_look_at() -> None:
    count = sum(len(list(_shown(page.read_text(encoding="utf-8")))) for page in PAGES)
    assert count > 40
