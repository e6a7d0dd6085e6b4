"""What a server asks for with `WWW-Authenticate` (RFC 9110, section 11.6.1). Pure (no I/O)."""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))')
_SCHEME = re.compile(rf"({_TOKEN})(?:\s+|\s*$|(?=\s*,))")
_HEADER_CHARACTERS_MAX = 16_384


class Challenge(Struct, frozen=True):
    """One way to log in: `bearer` or `basic`, with its parameters by lower-case name."""

    scheme: str
    parameters: Mapping[str, str]


def parse_challenges(header: str) -> Sequence[Challenge]:
    """All challenges in a header's value; what cannot be understood ends the list."""
    text = header[:_HEADER_CHARACTERS_MAX]
    challenges: list[Challenge] = []
    parameters: dict[str, str] = {}
    position = 0
    while position < len(text):
        if text[position] in " \t,":
            position += 1
            continue
        parameter = _PARAMETER.match(text, position)
        if parameter and challenges:
            name, quoted, plain = parameter.groups()
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            parameters[name.lower()] = value
            position = parameter.end()
            continue
        scheme = _SCHEME.match(text, position)
        if scheme is None:
            break
        parameters = {}
        challenges.append(Challenge(scheme[1].lower(), parameters))
        position = scheme.end()
    return challenges
