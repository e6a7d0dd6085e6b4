"""Asking the server of a checkpoint mount, over a socket beside the mount's state.

`ControlServer` is one thread of the server's process; `ask` is the other side. The exchange is
that of `control_socket`.
"""

import contextlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import from_oserror
from bootseer.served import control_socket
from bootseer.served.control_socket import Command

_ANSWER_BYTES_MAX = 2**22


class ControlServer:
    """Answers commands until closed, or until the process ends."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        """Raises: BootseerError."""
        self._path = path
        self._commands = commands
        try:
            self._listener = control_socket.listen(path)
        except OSError as error:
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
            control_socket.answer_client(client, self._commands)


def ask(path: Path, command: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """The server's answer. Raises: UnavailableError, DeadlineError."""
    return control_socket.ask(
        path,
        command,
        whom="the mount's server",
        answer_bytes_max=_ANSWER_BYTES_MAX,
        timeout_s=timeout_s,
    )
