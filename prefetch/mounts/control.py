"""Talking to the server of a mount: a private stream socket for commands, the socket for
`bootseer.ready()`, and the life of the process for which it was started.

`ControlServer` is one thread of the server's process that waits for all of these; its callbacks run
in that thread and must be quick. `ask` is the other side. The exchange is that of `control_socket`.
"""

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError
from bootseer.served import control_socket
from bootseer.served.control_socket import Command
from bootseer.served.ready_socket import ReadySocket

_log = logging.getLogger(__name__)

_ANSWER_BYTES_MAX = 2**20


class ControlServer:
    """Answers commands until closed."""

    def __init__(self, directory: Path, ready_name: str, commands: Mapping[str, Command]) -> None:
        """Raises: OSError when a socket cannot be made."""
        self._commands = commands
        self._selector = selectors.DefaultSelector()
        self._timer: tuple[float, Callable[[], None]] | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._closing = False
        self._listener = control_socket.listen(directory / "control")
        self._ready = ReadySocket(ready_name)
        self._on_ready: Callable[[], None] | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for source in (self._listener, self._ready, self._wake_read):
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(
        self,
        on_ready: Callable[[], None],
        window_s: float,
        on_window: Callable[[], None],
    ) -> None:
        """Begin. `on_window` is called once, after `window_s` seconds."""
        self._on_ready = on_ready
        self._timer = (time.monotonic() + window_s, on_window)
        self._thread.start()

    def watch(self, pid: int, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` when process `pid` ends; before `start`. Raises: OSError."""
        fd = os.pidfd_open(pid)
        self._watched[fd] = on_exit
        self._selector.register(fd, selectors.EVENT_READ)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(control_socket.CLIENT_S + 1)
        self._listener.close()
        self._ready.close()

    def _run(self) -> None:
        while not self._closing:
            timeout_s = None
            if self._timer is not None:
                timeout_s = max(self._timer[0] - time.monotonic(), 0)
            events = self._selector.select(timeout_s)
            if self._timer is not None and time.monotonic() >= self._timer[0]:
                _, callback = self._timer
                self._timer = None
                self._call(callback)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._ready:
                    self._receive_ready()
                elif key.fd in self._watched:
                    self._selector.unregister(key.fd)
                    self._call(self._watched.pop(key.fd))
                    os.close(key.fd)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except (BootseerError, OSError) as error:
            _log.warning("%s", error)

    def _receive_ready(self) -> None:
        if self._ready.take() and self._on_ready is not None:
            self._call(self._on_ready)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            _log.debug("a client hung up: %s", error)
            return
        control_socket.answer_client(client, self._commands)


def ask(directory: Path, command: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """The server's answer. Raises: UnavailableError, DeadlineError."""
    return control_socket.ask(
        directory / "control",
        command,
        whom=f"the server of the mount {directory.name}",
        answer_bytes_max=_ANSWER_BYTES_MAX,
        timeout_s=timeout_s,
    )
