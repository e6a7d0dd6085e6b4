"""Asking a server process: a private stream socket in a folder of its user.

Owns the exchange, both sides of it: a request is one line of JSON that names a command, its answer
another. Only the server's own user and root are heard. Who waits for clients is the server's
affair. Functions; any thread.
"""

import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError, DeadlineError, UnavailableError

_log = logging.getLogger(__name__)

Command = Callable[[], Mapping[str, Any]]

CLIENT_S = 2.0
"""A client that says nothing for so long is hung up on: it holds up the others."""
_REQUEST_BYTES_MAX = 4096
_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The socket's path within the 107 bytes that an address has, however deep it lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """A listener at `path`, in place of one that a killed predecessor left. Raises: OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        with _short(path) as short:
            listener.bind(short)
            os.chmod(short, 0o600)
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    return listener


def answer_client(client: socket.socket, commands: Mapping[str, Command]) -> None:
    """Read one request, carry it out, answer, and hang up. Never raises OSError."""
    with client:
        try:
            client.settimeout(CLIENT_S)
            client.sendall(json.dumps(_answer(client, commands), default=str).encode() + b"\n")
        except OSError as error:
            _log.debug("a client hung up: %s", error)


def _answer(client: socket.socket, commands: Mapping[str, Command]) -> Mapping[str, Any]:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in (0, os.geteuid()):
        return {"error": "not permitted"}
    line = b""
    while not line.endswith(b"\n") and len(line) < _REQUEST_BYTES_MAX:
        part = client.recv(_REQUEST_BYTES_MAX)
        if not part:
            break
        line += part
    try:
        command = commands[json.loads(line)["command"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"error": "unknown command"}
    try:
        return command()
    except (BootseerError, OSError) as error:
        return {"error": str(error)}


def ask(
    path: Path, command: str, *, whom: str, answer_bytes_max: int, timeout_s: float
) -> dict[str, Any]:
    """The answer of the server at `path`, whom messages call `whom`.

    Raises: UnavailableError, DeadlineError.
    """
    answer = b""
    try:
        with (
            _short(path) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(timeout_s)
            connection.connect(short)
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < answer_bytes_max:
                part = connection.recv(65536)
                if not part:
                    break
                answer += part
        document = json.loads(answer)
    except TimeoutError as error:
        raise DeadlineError(f"{whom} did not answer in {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{whom} does not answer: {error}") from error
    if not isinstance(document, dict) or "error" in document:
        reason = document.get("error") if isinstance(document, dict) else "nonsense"
        raise UnavailableError(f"{whom} says: {reason}")
    return document
