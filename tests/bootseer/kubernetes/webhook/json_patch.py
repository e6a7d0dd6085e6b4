"""RFC 6902 as an API server carries it out; written after its text."""

import copy
from typing import Any


class PatchError(Exception):
    """Error of an operation that the document does not allow."""


def applied(document: Any, operations: list[dict[str, Any]]) -> Any:
    """Return the document after all operations; the given one is not changed."""
    document = copy.deepcopy(document)
    for operation in operations:
        *above, last = [
            token.replace("~1", "/").replace("~0", "~")
            for token in operation["path"].split("/")[1:]
        ]
        place = document
        for token in above:
            place = _member(place, token)
        _apply(place, last, operation)
    return document


def _apply(place: Any, last: str, operation: dict[str, Any]) -> None:
    kind = operation["op"]
    if kind == "test":
        if _member(place, last) != operation["value"]:
            raise PatchError(f"{operation['path']} is another one")
    elif kind != "add":
        raise PatchError(f"{kind} is not expected")
    elif isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if not 0 <= index <= len(place):
            raise PatchError(f"{operation['path']} is beyond the end")
        place.insert(index, copy.deepcopy(operation["value"]))
    elif isinstance(place, dict):
        place[last] = copy.deepcopy(operation["value"])
    else:
        raise PatchError(f"nothing can be added at {operation['path']}")


def _member(place: Any, token: str) -> Any:
    try:
        return place[int(token)] if isinstance(place, list) else place[token]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PatchError(f"there is no {token}") from error
