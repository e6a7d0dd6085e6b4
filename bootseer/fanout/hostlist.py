"""Host lists as Slurm writes them (`rack[0-1]node[01-16],login`), and files with a host per line.

Pure. The text comes from variables and files that whoever starts a job may set: the number of hosts
is known before any name is made of it, and no parse takes longer than in proportion to the text.
"""

import math
import re
from itertools import product

from bootseer.base.display import quoted
from bootseer.errors import InvalidInputError

HOSTS_MAX = 65_536
"""Most hosts in a list: the limit of Slurm (MAX_RANGE of hostlist.c)."""
TEXT_BYTES_MAX = 4 << 20
"""Size of the longest list, and of the largest file, that is read: 64 bytes for each host."""
_DIGITS_MAX = 18
_NAME_MAX = 253
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_RANGES = re.compile(r"\[([0-9,-]+)\]")
_RANGE = re.compile(rf"([0-9]{{1,{_DIGITS_MAX}}})(?:-([0-9]{{1,{_DIGITS_MAX}}}))?")
_HOST = re.compile(rf"(?=.{{1,{_NAME_MAX}}}\Z)[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def expand_hosts(text: str, what: str) -> tuple[str, ...]:
    """Return the names in a host list, in its order; the last pair of brackets varies fastest.

    A range has the width of its first number: `n[08-10]` is n08, n09, n10. `what` names the list in
    messages. Raises: InvalidInputError.
    """
    if len(text) > TEXT_BYTES_MAX:
        raise InvalidInputError(f"{what} is longer than {TEXT_BYTES_MAX} characters")
    hosts: list[str] = []
    at = 0
    while True:
        parts, at = _entry(text, at)
        if not parts or (at < len(text) and text[at] != ","):
            raise _unreadable(text, at, what)
        # Both before any name is made: a long word before a wide range would fill the memory.
        if len(hosts) + math.prod(map(_count, parts)) > HOSTS_MAX:
            raise InvalidInputError(f"{what} names more than {HOSTS_MAX} hosts")
        if sum(map(_length, parts)) > _NAME_MAX:
            raise InvalidInputError(f"{what} has a name of more than {_NAME_MAX} characters")
        hosts += map("".join, product(*map(_names, parts)))
        if at == len(text):
            break
        at += 1
    for host in hosts:
        if not is_host(host):
            raise InvalidInputError(
                f"{what} has {quoted(host.encode())}, which is no name of a host"
            )
    return tuple(hosts)


def is_host(text: str) -> bool:
    """Whether `text` has the form of a host's name or of an IPv4 address."""
    return bool(_HOST.fullmatch(text))


_Part = str | list[tuple[int, int, int]]
"""Text, or ranges: first and last number, and the width to which they are padded."""


def _entry(text: str, at: int) -> tuple[list[_Part], int]:
    """Return the parts of the entry that begins at `at`, and where it ends or cannot be read."""
    parts: list[_Part] = []
    while at < len(text):
        if plain := _PLAIN.match(text, at):
            parts.append(plain[0])
            at = plain.end()
        elif (found := _RANGES.match(text, at)) and (ranges := _ranges(found[1])):
            parts.append(ranges)
            at = found.end()
        else:
            break
    return parts, at


def _ranges(text: str) -> list[tuple[int, int, int]]:
    """Return the ranges between two brackets; none where they cannot be read."""
    ranges = []
    for word in text.split(","):
        match = _RANGE.fullmatch(word)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            return []
        ranges.append((first, last, len(match[1])))
    return ranges


def _count(part: _Part) -> int:
    return 1 if isinstance(part, str) else sum(last - first + 1 for first, last, _ in part)


def _length(part: _Part) -> int:
    if isinstance(part, str):
        return len(part)
    return max(max(width, len(str(last))) for _, last, width in part)


def _names(part: _Part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [
        f"{number:0{width}}" for first, last, width in part for number in range(first, last + 1)
    ]


def _unreadable(text: str, at: int, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what} cannot be read at {quoted(text[at : at + 40].encode())} (character {at + 1}); "
        "write names as in node[01-16],login"
    )
