"""Every command's help ends with an example, and the command accepts it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from tests.bootseer.cli.conftest import World
from tests.support.cli_reference import commands, root_context

_ALL = [(context.command_path, command) for command, context in commands(cli, root_context())]
_EXAMPLES = [
    (path, command.epilog.removeprefix("Example: "))
    for path, command in _ALL
    if command.epilog is not None
]


def parse(words: list[str]) -> str:
    """Return the path of the command that accepts `words`. Raises: click.UsageError."""
    assert words[0] == "bootseer"
    command: click.Command = cli
    context = cli.make_context(words[0], words[1:])
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, inner, rest = command.resolve_command(context, rest)
        assert inner is not None
        command = inner
        context = command.make_context(name, rest, parent=context)
    return context.command_path


def test_each_example_parses() -> None:
    reached = {path: parse(shlex.split(example)) for path, example in _EXAMPLES}
    assert {path: to for path, to in reached.items() if path not in (to, "bootseer")} == {}


def test_an_example_that_does_not_parse_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["bootseer", "image", "list", "--jsn"])
    with pytest.raises(click.UsageError):
        parse(["bootseer", "image", "lst"])


def test_each_commands_help_ends_with_an_example() -> None:
    for path, command in _ALL:
        words = path.split()[1:]
        result = CliRunner().invoke(cli, [*words, "--help"], prog_name="bootseer")
        assert (result.exit_code, result.stderr) == (0, ""), path
        assert result.stdout.startswith("Usage: " + path)
        if not isinstance(command, click.Group):
            # At the end, whatever the width of the terminal.
            last = result.stdout.rstrip().rpartition("\n\n")[2]
            assert last.split()[:2] == ["Example:", "bootseer"], path
        short = CliRunner().invoke(cli, [*words, "-h"], prog_name="bootseer")
        assert short.stdout == result.stdout


def test_help_is_asked_for_as_any_command(world: World) -> None:
    for words in ((), ("image",), ("run",)):
        result = world(*words, "--help")
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith("Usage: " + " ".join(("bootseer", *words)))
        assert world(*words, "-h").out == result.out


def test_version_says_which(world: World) -> None:
    result = world("--version")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("bootseer, version ")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("rnu",), "Did you mean 'run'?"),
        (("docter",), "Did you mean 'doctor'?"),
        (("image", "fecth"), "Did you mean 'fetch'?"),
        (("snapshot", "verfy"), "Did you mean 'verify'?"),
        (("checkpoint", "convret"), "Did you mean 'convert'?"),
        (("cache", "zzzzzz"), "No such command 'zzzzzz'.\n"),
        (
            ("run", "python", "x", "--epochs", "3"),
            "put -- before COMMAND: bootseer run ... -- COMMAND --epochs",
        ),
        (("warm", "/x", "python", "--epochs=3"), "bootseer warm ... -- COMMAND --epochs"),
    ],
    ids=" ".join,
)
def test_a_slip_is_answered_with_what_is_meant(
    world: World, words: tuple[str, ...], hint: str
) -> None:
    found = world(*words)
    assert found.code == 2
    assert hint in found.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes(shell: str, tmp_path: Path) -> None:
    """docs/operations.md says how."""
    asked = {"COMP_WORDS": "bootseer sn", "COMP_CWORD": "sn" if shell == "fish" else "1"}
    program = Path(sys.executable).with_name("bootseer")
    for instruction, expected in (("source", "_BOOTSEER_COMPLETE"), ("complete", "snapshotter")):
        environ = {**os.environ, **asked, "_BOOTSEER_COMPLETE": f"{shell}_{instruction}"}
        done = subprocess.run(
            [program], env=environ, capture_output=True, text=True, timeout=100, cwd=tmp_path
        )
        assert done.returncode == 0
        assert expected in done.stdout
