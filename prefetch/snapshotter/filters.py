"""containerd's filters of lists: `kind==active,labels."a.b"==c`.

The grammar is that of containerd's package `filters`: selectors separated by commas, all of which
must match. A selector is a field with an operator (`==`, `!=`, or `~=` for a regular expression)
and a value, or a field alone, which must exist. Names and values may be quoted. Pure.
"""

import re
from collections.abc import Callable, Sequence

from bootseer.base.documents import from_line
from bootseer.errors import CorruptError, InvalidInputError
from bootseer.prefetch.snapshotter.snapshot import Snapshot

Filter = Callable[[Snapshot], bool]

_QUOTED = r'"(?:[^"\\\n]|\\.)*"'
_NAME = rf"(?:{_QUOTED}|\w+)"
_SELECTOR = re.compile(
    rf"(?P<path>{_NAME}(?:\.{_NAME})*)(?:(?P<operator>==|!=|~=)(?P<value>{_QUOTED}|[^\s,\"]+))?"
)
_FILTER_CHARACTERS_MAX = 8192


def any_of(texts: Sequence[str]) -> Filter:
    """Return a filter that accepts a snapshot if at least one of `texts` does, or all without one.

    Raises: InvalidInputError.
    """
    filters = [_parse(text) for text in texts]
    return lambda snapshot: not filters or any(accept(snapshot) for accept in filters)


def _parse(text: str) -> Filter:
    if len(text) > _FILTER_CHARACTERS_MAX:
        raise InvalidInputError("a filter of a list is too long")
    selectors: list[Filter] = []
    position = 0
    while position < len(text):
        match = _SELECTOR.match(text, position)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise InvalidInputError(f"{text[:200]!r} is no filter of a list")
        path = [_unquoted(name) for name in re.findall(_NAME, match["path"])]
        selectors.append(_selector(path, match["operator"], _unquoted(match["value"] or "")))
        position = match.end() + 1
    return lambda snapshot: all(accept(snapshot) for accept in selectors)


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return from_line(text, str)
    except CorruptError:
        raise InvalidInputError(f"{text[:200]} in a filter of a list is quoted wrongly") from None


def _selector(path: Sequence[str], operator: str | None, value: str) -> Filter:
    if operator is None:
        return lambda snapshot: _field(snapshot, path) is not None
    if operator == "==":
        return lambda snapshot: _field(snapshot, path) == value
    if operator == "!=":
        return lambda snapshot: _field(snapshot, path) != value
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise InvalidInputError(f"{value[:100]!r} is no regular expression: {error}") from None

    def matches(snapshot: Snapshot) -> bool:
        text = _field(snapshot, path)
        return text is not None and pattern.search(text) is not None

    return matches


def _field(snapshot: Snapshot, path: Sequence[str]) -> str | None:
    if path[0] == "labels":
        return snapshot.labels.get(".".join(path[1:]))
    fields = {"kind": snapshot.kind.value, "name": snapshot.key, "parent": snapshot.parent}
    return fields.get(path[0]) if len(path) == 1 else None
