"""Requests to a preloader: to fork a worker, or to serve another start.

Only this module reads requests, and decides whether the requested process can be a fork of the
preloader. Standard library alone.
"""

import marshal
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any

from bootseer.served.preload import is_worker_variable
from bootseer.served.preload.preloaded import NATIVE

_REQUEST_BYTES_MAX = 1 << 24


def differing_attribute(own: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return why a process with these attributes cannot be a fork; empty if it can. Pure."""
    for what, value in asked.items():
        if own.get(what) != value:
            return f"its {what} differs from the preloader's"
    return ""


def differing_variable(
    own: Mapping[bytes, bytes],
    asked: Mapping[bytes, bytes],
    variables_read: Collection[str],
    varying: Collection[str],
) -> str:
    """Return why a process with the variables `asked` cannot be a fork; empty if it can. Pure.

    `variables_read` are those that an import has read; `varying` differ from start to start.
    """
    for raw in sorted({*own, *asked}):
        if own.get(raw) == asked.get(raw):
            continue
        name = os.fsdecode(raw)
        if name in variables_read:
            return f"the variable {name} differs, which was read by an import"
        if name.startswith(NATIVE) or not (is_worker_variable(name) or name in varying):
            return f"the variable {name} differs"
    return ""


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its descriptors. Raises: OSError, ValueError, EOFError if malformed."""
    data, descriptors, _, _ = socket.recv_fds(connection, 8, 256)
    try:
        size = int.from_bytes(data, "big")
        if len(data) != 8 or size > _REQUEST_BYTES_MAX or not descriptors:
            raise ValueError("the request has an unknown format")
        text = b""
        while len(text) < size:
            piece = connection.recv(min(size - len(text), 1 << 20))
            if not piece:
                raise EOFError("the connection was closed")
            text += piece
        request = marshal.loads(text)
        if len(request["descriptors"]) + 1 != len(descriptors):
            raise ValueError("descriptors are missing")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, descriptors
