"""Set-up lines that are plain commands, whose words name their inputs, and those for a shell."""

import pytest

from bootseer.errors import InvalidInputError
from bootseer.launch.job import setup_command


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pip install -r requirements.txt", ["pip", "install", "-r", "requirements.txt"]),
        ("pip  install 'a b' \"c d\"", ["pip", "install", "a b", "c d"]),
    ],
)
def test_a_simple_line_runs_without_a_shell(line: str, words: list[str]) -> None:
    assert setup_command(line) == words


@pytest.mark.parametrize(
    "line",
    [
        *("a && b", "a; b", "a | b", "a > b", "echo $HOME", "ls *.whl", "X=1 make", "a\nb", "(a)"),
        *(". ./setup.sh", "exit 9", "cd x", "pip install 'a>=1'", "cat ~/x", "a `b`", "a #b"),
    ],
)
def test_a_line_with_shell_syntax_is_for_the_shell(line: str) -> None:
    assert setup_command(line) == ["sh", "-c", line]


@pytest.mark.parametrize("line", ["", "  ", "'open", 'a "b'])
def test_lines_that_cannot_be_meant_are_refused(line: str) -> None:
    with pytest.raises(InvalidInputError):
        setup_command(line)
