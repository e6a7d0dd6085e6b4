"""What every command shares: settings from flags, JSON for programs, tables for people.

Data goes to stdout, everything else to stderr.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import Struct

from bootseer.base.redact import redact
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.settings.config import TABLE, Config, Settings, load_config, short_name
from bootseer.settings.values import parse_age, parse_duration, parse_max_age, parse_size

if TYPE_CHECKING:
    from bootseer.store import Store

_F = TypeVar("_F", bound=Callable[..., Any])
_UNIT = re.compile(
    r"( s|/s|%|^(bytes|size|files|nodes|ranks|ratio|moved|first|second|share|count))$"
)


class SettingsSource(Struct, dict=True):
    """The flags of the top-level command; settings are read only by commands that need them."""

    flags: Mapping[str, str | None]

    @cached_property
    def config(self) -> Config:
        """Raises: InvalidInputError."""
        return load_config(self.flags)


def current_config() -> Config:
    """The settings of the command that is running, and where each came from."""
    source = click.get_current_context().find_object(SettingsSource)
    return (source or SettingsSource({})).config


def current_settings() -> Settings:
    """The settings of the command that is running."""
    return current_config().settings


def open_current_store() -> "Store":
    """The store of the command that is running. Close it, or use it as a context manager."""
    from bootseer.store import open_own_store

    return open_own_store(current_settings(), say)


def setting_options(*names: str) -> Callable[[_F], _F]:
    """One option for each of these settings; `SettingsSource.flags` takes their parameters."""

    def add(command: _F) -> _F:
        for name in reversed(names):
            flag = f"--{short_name(name).replace('_', '-')}"
            one = TABLE[name]
            command = click.option(flag, name, metavar=one.kind.placeholder, help=one.help)(command)
        return command

    return add


def json_option(command: _F) -> _F:
    """Adds `--json` as the parameter `as_json`."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
    return option(command)


def emit_json(value: Any) -> None:
    """One JSON document on stdout; bytes in names are shown with surrogate escapes."""
    json.dump(value, sys.stdout, indent=2, sort_keys=False, ensure_ascii=True, default=str)
    sys.stdout.write("\n")


def emit_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A table on stdout. Columns headed by a figure's name or unit are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    _tolerate_any_text()
    table = Table(
        title=printable(title) if title else None, title_justify="left", box=None, pad_edge=False
    )
    for column in columns:
        right = bool(_UNIT.search(column))
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    console = Console(soft_wrap=False, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=200, highlight=False, markup=False)
    # Not by the console itself, which exits by itself where stdout is closed.
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write(captured.get())


def printable(text: str) -> str:
    """`text` as it may be shown on a terminal: names from a store may hold its control codes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _tolerate_any_text() -> None:
    """A locale that cannot show a letter costs the letter, not the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def one_line(error: BaseException) -> str:
    """`error` as one line of text that is safe to show: no credentials, no control codes."""
    if isinstance(error, BootseerError) or not isinstance(error, OSError):
        text = str(error) or type(error).__name__
    else:
        text = error.strerror or str(error)
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
    return redact(printable(" ".join(text.split("\n"))))


class FiniteRange(click.FloatRange):
    """A number in a range; click's own takes "nan", which is outside of none, and "inf"."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be compared", param, ctx)
        return number


class Seconds(FiniteRange):
    """A time in a range, in seconds: "30", "30s", "10m"."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            number = value if isinstance(value, float) else parse_duration(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)
        return float(super().convert(number, param, ctx))


class Age(click.ParamType[float]):
    """Seconds, from "7d"."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return value if isinstance(value, float) else parse_age(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


class MaxAge(click.ParamType[float]):
    """How old a snapshot may be."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return value if isinstance(value, float) else parse_max_age(str(value))
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


class Size(click.ParamType[int]):
    """A number of bytes, as "512MiB"."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        return value if isinstance(value, int) else parse_size(str(value))


def say(sentence: str) -> None:
    """A sentence for people, on stderr, without credentials and control codes."""
    click.echo(f"bootseer: {redact(printable(sentence))}", err=True)


def human_bytes(count: float) -> str:
    """1234567 -> "1.2 MB" (decimal units, as networks and disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_time(time_ns: int) -> str:
    """A wall clock's nanoseconds -> "2026-11-22 09:30:00Z"; "-" for none, or for one beyond all
    calendars."""
    with contextlib.suppress(OverflowError, ValueError, OSError):
        if time_ns:
            return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d %H:%M:%SZ}"
    return "-"
