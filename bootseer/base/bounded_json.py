"""JSON from a disk or a network, of bounded size. Pure (no I/O).

Three bytes of JSON, an empty list and a comma, become 72 bytes of objects: so the values that a
document can have are counted before any of them is made.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bootseer.errors import CorruptError

VALUE_COUNT_MAX = 2**22
"""Of what ends up as objects, some 0.4 GiB; a record of a million paths has a third of that."""


def parse_json(
    data: bytes, where: str, size_max: int, value_count_max: int = VALUE_COUNT_MAX
) -> Any:
    """The document in `data`, of at most `size_max` bytes. Raises: CorruptError, naming `where`."""
    if len(data) > size_max:
        raise CorruptError(f"{where} is larger than {size_max} bytes")
    # Those within strings count, too: nothing that is ours comes near the limit.
    if sum(map(data.count, (b",", b"[", b"{"))) > value_count_max:
        raise CorruptError(f"{where} has more than {value_count_max} values")
    try:
        return json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where} is not valid JSON") from error


def members_digest(document: Mapping[str, Any], without: str) -> str:
    """`sha256:<hex>` of all that a document says, known to this release or not, but for the member
    that holds this digest: of its members as JSON without blanks, sorted by name."""
    members = {key: value for key, value in document.items() if key != without}
    data = json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(data.encode("ascii")).hexdigest()


def _refuse(constant: str) -> Any:
    """NaN and the infinities are no JSON, and no number that anything here means."""
    raise ValueError(constant)
