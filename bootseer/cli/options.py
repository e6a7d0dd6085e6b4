"""Kinds of values of options, and options that several commands take."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from bootseer.cli.command_tree import current_settings
from bootseer.cli.grammar import Option
from bootseer.cli.text import say
from bootseer.errors import InvalidInputError
from bootseer.settings.config import RESTORE_MODES
from bootseer.settings.values import parse_age, parse_duration, parse_size

if TYPE_CHECKING:
    from bootseer.store import Store

T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., Any])


def open_current_store() -> "Store":
    """Return the store of the command that is running. Close it, or use it as a context manager."""
    from bootseer.store import open_own_store

    return open_own_store(current_settings(), say)


class FiniteRange(click.FloatRange):
    """Number in a range; click's own takes "nan", which is outside of none, and "inf"."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be compared", param, ctx)
        return number


class _Seconds(FiniteRange):
    """Duration in a range, in seconds: "30", "30s", "10m"."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = value if isinstance(value, float) else parse_duration(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)
        return float(super().convert(number, param, ctx))


def time_option(
    *names: str,
    help: str,
    default_s: float | None = None,
    least_s: float = 0,
    most_s: float = 86_400,
) -> Callable[[_F], _F]:
    """Return an option for a duration in seconds, from `least_s` to `most_s`."""
    return click.option(
        *names,
        type=_Seconds(least_s, most_s),
        default=default_s,
        show_default=default_s is not None,
        metavar="TIME",
        help=help,
    )


class _Parsed(click.ParamType[T]):
    """Value that a function reads from text."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        """`parse`: returns the value of a text. Raises: InvalidInputError."""
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._parse(value) if isinstance(value, str) else cast(T, value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


def _octal(text: str) -> int:
    try:
        bits = int(text, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise InvalidInputError(f"{text!r} is no octal number from 0 to 777.")
    return bits


AGE = _Parsed("age", parse_age)
"""Age in seconds, written as "7d"."""
SIZE = _Parsed("size", parse_size)
"""Number of bytes, written as "512MiB"."""
OCTAL = _Parsed("mode", _octal)
"""Permission bits, written as "022"."""


def options(*group: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds these options and arguments, in this order."""

    def add(command: _F) -> _F:
        for one in reversed(group):
            command = one(command)
        return command

    return add


def params_of(group: Sequence[Option]) -> list[click.Parameter]:
    """Return the parameters of click for options of the grammar."""
    return [
        click.Option(
            [one.flag, one.parameter],
            metavar=one.metavar or None,
            is_flag=not one.metavar,
            multiple=one.repeats,
            type=click.Choice(one.choices) if one.choices else None,
            default=one.default if one.metavar else False,
            show_default=one.default is not None,
            help=one.help,
        )
        for one in group
    ]


def options_of(group: Sequence[Option]) -> Callable[[_F], _F]:
    """Return a decorator that adds options of the grammar, in this order."""

    def add(command: _F) -> _F:
        # As `click.option` notes them: the last one first.
        noted = command.__dict__.setdefault("__click_params__", [])
        noted += reversed(params_of(group))
        return command

    return add


mode_option = click.option(
    "--mode",
    metavar="MODE",
    type=click.Choice(RESTORE_MODES),
    help="How to restore: auto, mount, link or extract. Default: BOOTSEER_RESTORE_MODE.",
)
