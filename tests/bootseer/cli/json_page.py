"""docs/json.md, and whether a command's `--json` agrees with it."""

import re
from collections.abc import Iterator
from typing import Any

from testbed.paths import REPOSITORY

_ROW = re.compile(r"\| `(.+?)` \|(.*)\|")


def documented() -> dict[str, dict[str, bool]]:
    """For each command: key -> whether it is always there."""
    sections: dict[str, dict[str, bool]] = {}
    current: dict[str, bool] = {}
    for line in (REPOSITORY / "docs/json.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            current = sections.setdefault(line[3:], {})
        elif match := _ROW.fullmatch(line):
            current[match[1]] = "(optional)" not in match[2]
    return sections


def keys(value: Any, path: str, free: frozenset[str]) -> Iterator[str]:
    """The paths of all leaves; below a path in `free` the keys are data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            name = "*" if path in free else key
            yield from keys(inner, f"{path}.{name}" if path else name, free)
    elif isinstance(value, list):
        if not value or not isinstance(value[0], dict):
            yield path + "[]"
        for inner in value if value and isinstance(value[0], dict) else ():
            yield from keys(inner, path + "[]", free)
    else:
        yield path


def agree(section: str, value: Any, *, free: tuple[str, ...] = (), more: str = "") -> None:
    """`value` has the keys of a section, and of the section `more`; below `free` they are data."""
    page = documented()
    wanted = {**page[section], **(page[more] if more else {})}
    found = set(keys(value, "", frozenset(free)))
    assert found <= set(wanted), f"{section}: not documented: {found - set(wanted)}"
    missing = {key for key, always in wanted.items() if always} - found
    assert not missing, f"{section}: documented, but not there: {missing}"
