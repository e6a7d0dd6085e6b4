"""Asking the server of a mount: a private stream socket beside the mount's state.

`ControlServer` is one thread of the server's process; a request is one line of JSON that names a
command, its answer another. Only the mount's own user and root are heard. `ask` is the other side.
"""

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError, DeadlineError, UnavailableError, from_oserror

_log = logging.getLogger(__name__)

Command = Callable[[], Mapping[str, Any]]

_REQUEST_BYTES_MAX = 4096
_ANSWER_BYTES_MAX = 2**22
# A client that says nothing for so long is hung up on: it holds up the others.
_CLIENT_S = 2.0
_CREDENTIALS = struct.Struct("3i")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The socket's path within the 107 bytes that an address has, however deep it lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class ControlServer:
    """Answers commands until closed, or until the process ends."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        """Raises: BootseerError."""
        self._path = path
        self._commands = commands
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A predecessor that was killed left its own.
            path.unlink(missing_ok=True)
            with _short(path) as short:
                self._listener.bind(short)
                os.chmod(short, 0o600)
            self._listener.listen(16)
        except OSError as error:
            self._listener.close()
            raise from_oserror(error, f"make the control socket {path}") from error
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        with contextlib.suppress(OSError):
            # Wakes the thread, which close alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                try:
                    client.settimeout(_CLIENT_S)
                    client.sendall(json.dumps(self._answer(client), default=str).encode() + b"\n")
                except OSError as error:
                    _log.debug("a client hung up: %s", error)

    def _answer(self, client: socket.socket) -> Mapping[str, Any]:
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
            command = self._commands[json.loads(line)["command"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": "unknown command"}
        try:
            return command()
        except (BootseerError, OSError) as error:
            return {"error": str(error)}


def ask(path: Path, command: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """The server's answer. Raises: UnavailableError, DeadlineError."""
    answer = b""
    try:
        with _short(path) as short, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(short)
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < _ANSWER_BYTES_MAX:
                part = connection.recv(65536)
                if not part:
                    break
                answer += part
        document = json.loads(answer)
    except TimeoutError as error:
        raise DeadlineError(f"the mount's server did not answer in {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise UnavailableError(f"the mount's server does not answer: {error}") from error
    if not isinstance(document, dict) or "error" in document:
        reason = document.get("error") if isinstance(document, dict) else "nonsense"
        raise UnavailableError(f"the mount's server says: {reason}")
    return document
