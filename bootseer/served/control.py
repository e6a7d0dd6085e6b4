"""Control socket of a server: a private stream socket in the server's folder.

A request is one line of JSON that names a command; the answer is another line. Only this module
implements both sides. The server answers only its own user and root. `ControlServer` is one thread
of the server, which waits for clients and for the other events of a server: the message that a
start is over, a time, the end of a process. Its callbacks run in that thread and must be quick.
`ask` is the client's side, for any thread.
"""

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import from_line, to_line
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    UnavailableError,
    from_oserror,
)
from bootseer.linux.processes import ProcessId
from bootseer.served.ready_socket import ReadySocket

_log = logging.getLogger(__name__)

Command = Callable[[], Mapping[str, Any]]

_NAME = "control"
_CLIENT_S = 2.0
"""Limit for a client to send its request, since one client holds up the others."""
_REQUEST_BYTES_MAX = 4096
_ANSWER_BYTES_MAX = 2**22
_CREDENTIALS = struct.Struct("3i")


class _ControlRequest(Struct, frozen=True):
    command: str


class ControlServer:
    """Thread that answers commands, from `start` until `close` or the end of the process."""

    def __init__(
        self, directory: Path, commands: Mapping[str, Command], ready_name: str | None = None
    ) -> None:
        """Make the socket in the server's folder. Raises: BootseerError.

        `ready_name` is the entry of BOOTSEER_READY_SOCKETS at which to listen for the job's
        `ready`.
        """
        self._commands = commands
        self._selector = selectors.DefaultSelector()
        self._timer: tuple[float, Callable[[], None]] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._watched: dict[int, Callable[[], None]] = {}
        self._closing = False
        try:
            self._listener = listen(directory / _NAME)
        except OSError as error:
            raise from_oserror(error, f"make the control socket of {directory}") from error
        self._ready = None if ready_name is None else ReadySocket(ready_name)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for source in (self._listener, self._wake_read):
            self._selector.register(source, selectors.EVENT_READ)
        if self._ready is not None:
            self._selector.register(self._ready, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(
        self,
        on_ready: Callable[[], None] | None = None,
        window_s: float = 0.0,
        on_window: Callable[[], None] | None = None,
    ) -> None:
        """Begin to answer. `on_window` is called once, after `window_s` seconds."""
        self._on_ready = on_ready
        if on_window is not None:
            self._timer = (time.monotonic() + window_s, on_window)
        self._thread.start()

    def watch(self, process: ProcessId, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` when the process ends. Use before `start`, or in a callback.

        Raises: ProcessLookupError if it has ended; OSError.
        """
        self.watch_descriptor(process.open(), on_exit)

    def watch_descriptor(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` once, when `fd` is readable, then close `fd`. Call before `start`."""
        self._watched[fd] = on_readable
        self._selector.register(fd, selectors.EVENT_READ)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLIENT_S + 1)
        self._listener.close()
        if self._ready is not None:
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
                self._run_callback(callback)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._ready:
                    self._receive_ready()
                elif key.fd in self._watched:
                    self._selector.unregister(key.fd)
                    self._run_callback(self._watched.pop(key.fd))
                    os.close(key.fd)

    @staticmethod
    def _run_callback(callback: Callable[[], None]) -> None:
        try:
            callback()
        except (BootseerError, OSError) as error:
            _log.warning("%s", error)
        except Exception:
            # The thread must go on: without it nobody could ask, and the mount would never end.
            _log.exception("unexpected error in the control thread")

    def _receive_ready(self) -> None:
        assert self._ready is not None
        if self._ready.take() and self._on_ready is not None:
            self._run_callback(self._on_ready)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            _log.debug("a client hung up: %s", error)
            return
        _answer_client(client, self._commands)


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Give an address for the socket `path` that fits into 107 bytes, however long the path is."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def is_trusted_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's or root's. Raises: OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (0, os.geteuid())


def listen(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Return a private listener at `path`; replace an old socket. Raises: OSError."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        path.unlink(missing_ok=True)
        with short_address(path) as short:
            listener.bind(short)
            os.chmod(short, 0o600)
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    return listener


def _answer_client(client: socket.socket, commands: Mapping[str, Command]) -> None:
    with client:
        try:
            client.settimeout(_CLIENT_S)
            client.sendall(_answer_line(client, commands))
        except OSError as error:
            _log.debug("a client hung up: %s", error)


def _answer_line(client: socket.socket, commands: Mapping[str, Command]) -> bytes:
    try:
        return to_line(_answer(client, commands)).encode() + b"\n"
    except OSError:
        raise
    except Exception as error:
        _log.exception("unexpected error in the answer to a client")
        failure = f"an unexpected {type(error).__name__}; the server's log has more"
        return to_line({"error": failure}).encode() + b"\n"


def _answer(client: socket.socket, commands: Mapping[str, Command]) -> Mapping[str, Any]:
    if not is_trusted_peer(client):
        return {"error": "not permitted"}
    line = b""
    while not line.endswith(b"\n") and len(line) < _REQUEST_BYTES_MAX:
        part = client.recv(_REQUEST_BYTES_MAX)
        if not part:
            break
        line += part
    try:
        command = commands[from_line(line, _ControlRequest).command]
    except (CorruptError, KeyError):
        return {"error": "unknown command"}
    try:
        return command()
    except (BootseerError, OSError) as error:
        return {"error": str(error)}


def ask(directory: Path, command: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return a server's answer to a command. Raises: UnavailableError, DeadlineError."""
    server = f"the server of the mount {directory.name}"
    answer = b""
    try:
        with (
            short_address(directory / _NAME) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.settimeout(timeout_s)
            connection.connect(short)
            connection.sendall(to_line(_ControlRequest(command)).encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < _ANSWER_BYTES_MAX:
                part = connection.recv(65536)
                if not part:
                    break
                answer += part
        document = from_line(answer, dict[str, Any])
    except TimeoutError as error:
        raise DeadlineError(f"{server} did not answer in {timeout_s:g} s") from error
    except (OSError, CorruptError) as error:
        raise UnavailableError(f"{server} does not answer: {error}") from error
    if "error" in document:
        raise UnavailableError(f"{server} says: {document['error']}")
    return document
