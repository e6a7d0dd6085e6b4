"""Mutations of valid documents.

Content with a checksum is mutated before the checksum is computed, so that mutations are not
refused by it.
"""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


@st.composite
def mutated(draw: st.DrawFn, documents: Sequence[bytes]) -> bytes:
    """Draw one of `documents` with up to four mutations, or two of them spliced."""
    data = bytearray(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 6))
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            # An aligned number, where a length, a count or an offset may be.
            width = draw(st.sampled_from((1, 2, 4, 8)))
            place -= place % draw(st.sampled_from((1, width)))
            number = draw(st.sampled_from(_NUMBERS)) & (1 << 8 * width) - 1
            little = number.to_bytes(width, "little")
            data[place : place + width] = little if draw(st.booleans()) else little[::-1]
        elif kind == 2:
            # A varint, sometimes one without an end.
            data[place:place] = b"\xff" * draw(st.integers(1, 12)) + b"\x01"
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            del data[place : place + draw(st.integers(1, 64))]
        elif kind == 5:
            data[place:place] = draw(st.binary(max_size=16)) * draw(st.sampled_from((1, 2, 1000)))
        else:
            other = draw(st.sampled_from(documents))
            start = draw(st.integers(0, len(other)))
            data[place:place] = other[start : start + draw(st.integers(1, 600))]
    return bytes(data)


_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31, 2**63, 2**64, 10**300, 1e308, "", "x" * 5000, "\0", "\ud800",
    "../x", "/", [], [[]], {}, {"": {}}, [1] * 3000, "sha256:" + "0" * 64, "\n",
)  # fmt: skip


@st.composite
def mutated_json(draw: st.DrawFn, documents: Sequence[Any]) -> Any:
    """Draw one of the JSON values `documents` with parts replaced, dropped or repeated."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(document))
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            parent[key] = copy.deepcopy(draw(st.sampled_from(_VALUES)))
        elif kind == 1:
            del parent[key]
        elif kind == 2 and isinstance(parent, list):
            parent += [copy.deepcopy(parent[key]) for _ in range(draw(st.sampled_from((1, 2000))))]
        else:
            other, other_key = draw(st.sampled_from(places))
            parent[key] = copy.deepcopy(other[other_key])
    return document


def _places(value: Any) -> "Sequence[tuple[Any, Any]]":
    found: list[tuple[Any, Any]] = []
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


@st.composite
def mutated_json_bytes(draw: st.DrawFn, documents: Sequence[Any]) -> bytes:
    """Draw a `mutated_json` as bytes, which are sometimes mutated, too."""
    data = json.dumps(draw(mutated_json(documents))).encode()
    return draw(mutated((data,))) if draw(st.booleans()) else data
