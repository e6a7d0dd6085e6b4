"""Printing of the documents of commands: JSON for programs, tables for people.

A command returns a struct, or a list of structs. The names of its fields are the keys of `--json`
(docs/json.md is generated from the structs) and say the unit of a figure, by which a table shows
it: `_bytes`, `_ns` (since 1970), `_s`, `_count`. Data goes to stdout, everything else to stderr.
"""

import functools
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from msgspec import UNSET, Struct

from bootseer.base.display import format_age
from bootseer.base.documents import to_builtins
from bootseer.cli.text import human_bytes, human_time, printable
from bootseer.errors import EXIT_OK

T = TypeVar("T", bound=Struct)
_F = TypeVar("_F", bound=Callable[..., Any])
_FIGURE = re.compile(r"( s|/s|%|^(bytes|size|nodes|ranks|ratio|moved|first|second|share|.*count))$")
_SHORT = {"fingerprint": 12, "key": 12, "id": 12, "digest": 19}
"""Characters of an identity that tables show, by the last word of its name."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def shows(
    document: Any,
    *columns: str,
    text: Callable[[Any], object] | None = None,
    code: Callable[[Any], int] = lambda found: EXIT_OK,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds `--json` to a command and prints the document that it returns.

    Args:
        document: Type of what the command returns: a struct, or a list of structs.
        columns: Fields that the table has as columns, each as "field" or "heading=field".
        text: Prints the document for people, in place of the table.
        code: Returns the exit code of the command, from the document.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*args: Any, as_json: bool, **parameters: Any) -> int:
            found = command(*args, **parameters)
            if found is None:
                return EXIT_OK
            if as_json:
                emit_json(found)
            elif text is not None:
                text(found)
            elif columns:
                emit_records(found if isinstance(found, Sequence) else [found], *columns)
            return code(found)

        return json_option(documents(document)(run))

    return add


def documents(kind: Any) -> Callable[[_F], _F]:
    """Return a decorator that notes the type of the document for docs/json.md."""

    def add(command: _F) -> _F:
        command.__dict__["document"] = kind
        return command

    return add


def document_of(kind: type[T], source: object, **rest: Any) -> T:
    """Return a document with the fields that `source` has under the same names, and with `rest`."""
    names = [name for name in kind.__struct_fields__ if name not in rest and hasattr(source, name)]
    return kind(**{name: getattr(source, name) for name in names}, **rest)


def emit_json(value: Any) -> None:
    """Print one JSON document; bytes in names are shown with surrogate escapes."""
    json.dump(to_builtins(value), sys.stdout, indent=2, ensure_ascii=True, default=str)
    sys.stdout.write("\n")


def emit_records(records: Iterable[Struct], *columns: str, title: str | None = None) -> None:
    """Print a table with a row for each struct; see `shows` for the columns."""
    names = [column.rpartition("=")[2] for column in columns]
    heads = [column.rpartition("=")[0] or heading_of(column) for column in columns]
    rows = [
        [cell_of(name, getattr(one, name), head) for name, head in zip(names, heads, strict=True)]
        for one in records
    ]
    emit_table(heads, rows, title=title)


def heading_of(field: str) -> str:
    """Return the heading of a field: "stored_bytes" -> "stored", "began_s" -> "began s"."""
    if field.endswith("_s"):
        return field[:-2].replace("_", " ") + " s"
    return re.sub(r"_(bytes|ns)$", "", field).replace("_", " ")


def cell_of(field: str, value: object, heading: str = "") -> str:
    """Return the value of a field as a table shows it; a time is an age below the heading "age"."""
    if value is None or value is UNSET:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    unit = field.rpartition("_")[2]
    if isinstance(value, int) and unit == "bytes":
        return human_bytes(value)
    if isinstance(value, int) and unit == "ns":
        return format_age(time.time_ns() - value) if heading == "age" else human_time(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)[: _SHORT.get(unit)]


def emit_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Print a table. Columns headed by a figure's name or unit are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    _tolerate_any_text()
    table = Table(
        title=printable(title) if title else None, title_justify="left", box=None, pad_edge=False
    )
    for column in columns:
        right = bool(_FIGURE.search(column))
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    console = Console(soft_wrap=False, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(width=200, highlight=False, markup=False)
    # Written here, since the console ends the program if stdout is closed.
    with console.capture() as captured:
        console.print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _tolerate_any_text() -> None:
    """Escape letters that the locale cannot show, so that the command does not fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
