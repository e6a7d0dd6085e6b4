"""What processes ask a preloader for: to be forked, or to be taken over by another start.

Alone owns how a request is read, and decides whether who asks can be a fork of the preloader.
Standard library alone.
"""

import marshal
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any

from bootseer.served.preload import is_of_process
from bootseer.served.preload.preloaded import NATIVE

_REQUEST_BYTES_MAX = 1 << 24


def differing_situation(own: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Why a process in that situation (`shim.situation`) cannot be a fork; or nothing. Pure."""
    for what, value in asked.items():
        if own.get(what) != value:
            return f"its {what} differs from the preloader's"
    return ""


def differing_variable(
    own: Mapping[bytes, bytes],
    asked: Mapping[bytes, bytes],
    consulted: Collection[str],
    varying: Collection[str],
) -> str:
    """Why a process with these variables cannot be a fork; or nothing. Pure. `consulted`: those
    that an import has read; `varying`: those that differ from start to start."""
    for raw in sorted({*own, *asked}):
        if own.get(raw) == asked.get(raw):
            continue
        name = os.fsdecode(raw)
        if name in consulted:
            return f"the variable {name} differs, which was read by an import"
        if name.startswith(NATIVE) or not (is_of_process(name) or name in varying):
            return f"the variable {name} differs"
    return ""


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and the descriptors that came with it, which the caller closes.

    Raises: OSError, ValueError, EOFError where it is none.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 8, 256)
    try:
        size = int.from_bytes(data, "big")
        if len(data) != 8 or size > _REQUEST_BYTES_MAX or not descriptors:
            raise ValueError("it is not understood")
        text = b""
        while len(text) < size:
            piece = connection.recv(min(size - len(text), 1 << 20))
            if not piece:
                raise EOFError("it ended")
            text += piece
        request = marshal.loads(text)
        if len(request["descriptors"]) + 1 != len(descriptors):
            raise ValueError("files are missing")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, descriptors
