"""Every command of ours that the README and the docs show is one, with options that it has."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bootseer.cli import cli
from testbed.paths import REPOSITORY
from tests.support.cli_reference import root_context

# docs/cli.md is made from the commands themselves.
PAGES = [
    REPOSITORY / "README.md",
    *sorted({*(REPOSITORY / "docs").rglob("*.md")} - {REPOSITORY / "docs/cli.md"}),
]
# What may stand before it: a prompt, variables, a launcher.
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
        # A quoted script of several lines: what comes before it.
        words = shlex.split(line.rpartition("'")[0])
    return list(itertools.takewhile(lambda word: word not in ("&&", "||", "|", ";", "&"), words))


def _found(line: str, words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command, the context for what is behind its name, and that."""
    command: click.Command = cli
    context = root_context()
    while isinstance(command, click.Group) and words:
        child = command.get_command(context, words[0])
        assert child is not None, f"no such command: bootseer {line}"
        if isinstance(child, click.Group):
            context = click.Context(child, info_name=words[0], parent=context)
        command, words = child, words[1:]
    return command, context, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_in_blocks(page: Path) -> None:
    for line in _shown(page.read_text(encoding="utf-8")):
        command, context, words = _found(line, _words(line))
        try:
            # Parsed, not run.
            command.make_context(command.name, words, parent=context)
        except click.UsageError as error:
            pytest.fail(f"bootseer {line}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_in_sentences(page: Path) -> None:
    """These may leave out what is not their subject."""
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"(?<![`\w])`bootseer ([a-z][^`\\]*)`", text):
        command, _, words = _found(line, _words(line))
        known = {name for option in command.params for name in option.opts}
        words = list(itertools.takewhile(lambda word: word != "--", words))
        assert {word for word in words if word.startswith("-")} <= known, f"bootseer {line}"


def test_there_are_commands_to_look_at() -> None:
    count = sum(len(list(_shown(page.read_text(encoding="utf-8")))) for page in PAGES)
    assert count > 40
