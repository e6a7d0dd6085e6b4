"""Arguments are read alike before click is loaded and by click."""

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli.command_tree import cli, load
from bootseer.cli.grammar import COMMANDS, read_restore, read_run
from tests.bootseer.cli.conftest import World

_WORDS = st.sampled_from(
    [
        *("run", "--", "-v", "-vv", "--verbose", "--help", "--bogus", "word", "a b", "", "-x"),
        *("--job", "--job=j", "--attempt", "2", "--set", "fanout=off", "--set=record=never"),
        *("--setup", "--setup=s", "--target=t", "--image", "--image=i", "--mode", "--mode=link"),
        *("mount", "--mode=bad", "--keep", "--preload", "--preload=x", "--linger", "--entrypoint="),
    ]
)


_RESTORE_WORDS = st.sampled_from(
    [
        *(
            "snapshot",
            "restore",
            "-v",
            "--verbose",
            "--help",
            "--bogus",
            "key",
            "a b",
            "",
            "-x",
            "--",
        ),
        *("--job", "--job=j", "--set", "fanout=off", "--json", "--bogus", "--system=x"),
        *("--mode", "--mode=link", "--mode=bad", "--relocate", "--to=d", "--to", "--system"),
    ]
)


@st.composite
def _restores(draw: st.DrawFn) -> list[str]:
    """Return the words of a restore, with others around them."""
    before, between, behind = (draw(st.lists(_RESTORE_WORDS, max_size=size)) for size in (2, 1, 4))
    return [*before, "snapshot", *between, "restore", *behind]


def read_by_click(words: list[str]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return command, parameters and settings. Raises: click.UsageError, click.exceptions.Exit."""
    context = cli.make_context("bootseer", list(words))
    while isinstance(group := context.command, click.Group):
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    path = context.command_path.removeprefix("bootseer ")
    return path, context.params, context.obj.flags if context.obj else {}


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


@given(_restores())
def test_a_restore_is_read_as_click_reads_it(words: list[str]) -> None:
    line = read_restore(words)
    if line is None:
        return
    name, parameters, settings = read_by_click(words)
    assert name == "snapshot restore"
    assert parameters == {**line.options, "key": line.words[0], "as_json": False}
    told = {**line.settings, **dict(one.split("=", 1) for one in line.assignments)}
    assert settings == told


@pytest.mark.parametrize(
    "words",
    [
        ["snapshot", "restore", "key"],
        ["-v", "--store", "file:///s", "snapshot", "restore", "key", "--mode", "mount"],
        ["snapshot", "restore", "--system", "--job=j", "key"],
    ],
)
def test_an_ordinary_restore_needs_no_click(words: list[str]) -> None:
    line = read_restore(words)
    assert line is not None
    assert line.words == ["key"]


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
