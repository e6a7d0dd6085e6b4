"""Arguments are read alike before click is loaded and by click."""

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli.command_tree import cli, load
from bootseer.cli.grammar import COMMANDS, read_run
from tests.bootseer.cli.conftest import World

_WORDS = st.sampled_from(
    [
        *("run", "--", "-v", "-vv", "--verbose", "--help", "--bogus", "word", "a b", "", "-x"),
        *("--job", "--job=j", "--attempt", "2", "--set", "fanout=off", "--set=record=never"),
        *("--setup", "--setup=s", "--target=t", "--image", "--image=i", "--mode", "--mode=link"),
        *("mount", "--mode=bad", "--keep", "--preload", "--preload=x", "--linger", "--entrypoint="),
    ]
)


def read_by_click(words: list[str]) -> tuple[str | None, dict[str, Any], dict[str, str]]:
    """Return command, parameters and settings. Raises: click.UsageError, click.exceptions.Exit."""
    root = cli.make_context("bootseer", list(words))
    name, command, rest = cli.resolve_command(root, [*root._protected_args, *root.args])
    assert command is not None
    inner = command.make_context(name, rest, parent=root)
    return name, inner.params, inner.obj.flags if inner.obj else {}


@given(st.lists(_WORDS, max_size=9))
def test_a_start_is_read_as_click_reads_it(words: list[str]) -> None:
    line = read_run(words)
    if line is None:
        return
    name, parameters, settings = read_by_click(words)
    assert name == "run"
    assert parameters == {**line.options, "command": line.command}
    told = {**line.settings, **dict(one.split("=", 1) for one in line.assignments)}
    assert settings == told


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--", "true"],
        ["-v", "--store", "file:///s", "run", "--setup", "a", "--setup=b", "--", "true", "--x"],
        ["run", "--image", "i", "--"],
        ["run", "--job", "j", "--set", "keep_caches=off", "--preload", "--", "true"],
    ],
)
def test_an_ordinary_start_needs_no_click(words: list[str]) -> None:
    line = read_run(words)
    assert line is not None
    assert read_by_click(words)[1] == {**line.options, "command": line.command}


@pytest.mark.parametrize(
    "words",
    [["run", "true"], ["run", "--"], ["run", "-h", "--", "x"], ["--", "run"], ["warm", "--"]],
)
def test_help_and_slips_are_for_click(words: list[str]) -> None:
    assert read_run(words) is None


def test_each_command_of_the_table_is_there() -> None:
    for path in COMMANDS:
        assert load(path).name == path.rpartition(" ")[2]


def test_settings_stand_before_the_command_or_behind_it(world: World) -> None:
    for words in (
        ("--job", "x", "--set", "record_window=7", "config", "--json"),
        ("config", "--job", "x", "--set", "record-window=7", "--json"),
    ):
        shown = world(*words).json
        assert (shown["job"]["value"], shown["record_window_s"]["value"]) == ("x", 7.0)
        assert shown["record_window_s"]["source"] == "flag"
    ran = world("run", "--job", "x", "--", "sh", "-c", "echo $BOOTSEER_JOB")
    assert ran.out == "x\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no_such=1", "there is no such setting"),
        ("fanuot=off", "is fanout meant?"),
        ("fanout", "write --set fanout=VALUE"),
        ("fanout=maybe", "neither auto nor off"),
    ],
)
@pytest.mark.parametrize("command", [("config",), ("run", "--", "true")])
def test_a_setting_that_cannot_be_set_is_refused(
    world: World, text: str, says: str, command: tuple[str, ...]
) -> None:
    done = world("--set", text, *command)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_usage_error_names_the_option() -> None:
    with pytest.raises(click.UsageError, match="bogus"):
        read_by_click(["run", "--bogus", "--", "true"])
