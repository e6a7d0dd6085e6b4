"""docs/json.md, and whether a command's `--json` agrees with it."""

import re
from collections.abc import Iterator
from typing import Any

from testbed.paths import REPOSITORY

_ROW = re.compile(r"\| `(.+?)` \|.*\|")
_SAME = re.compile(r"As \[`(.+?)`\].*")


def documented() -> dict[str, set[str]]:
    """Return the keys of each section."""
    sections: dict[str, set[str]] = {}
    current = ""
    for line in (REPOSITORY / "docs/json.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            current = line[3:]
            sections[current] = set()
        elif match := _ROW.fullmatch(line):
            sections[current].add(match[1])
        elif match := _SAME.fullmatch(line):
            sections[current] |= sections.get(match[1], set())
    return sections


def keys(value: Any, path: str, free: frozenset[str]) -> Iterator[str]:
    """Yield the paths of all leaves; below a path in `free` the keys are data."""
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
    """Assert that the page has all keys of `value` in a section, or in the section `more`; below
    `free` they are data."""
    page = documented()
    wanted = page[section] | (page[more] if more else set())
    # An empty list, or null in place of an object, has none of the keys below it.
    inner = {key for one in wanted for key in (one.rpartition(".")[0],) if key}
    found = set(keys(value, "", frozenset(free)))
    assert found, section
    assert found <= wanted | inner, f"{section}: not documented: {found - wanted}"
