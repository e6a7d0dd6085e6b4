"""Protocol of the spawner, a process that starts background processes in place of their callers.

When a container ends, the processes that it has forked end with it. A process that the spawner
starts lives in the spawner's container and outlives the caller's. BOOTSEER_SPAWNER names the
spawner's socket. Only this module implements both sides: a request, with three descriptors, is one
message on a connection of its own; the answers are the pid and, later, that the process has ended,
one line each. A byte from the client kills the process; a client that hangs up lets it live. Any
thread.

The spawner's container may be of another release than a client's, since it is replaced later. The
processes that it starts are of its own release, and get plans made by the client's. So both sides
send their `PROTOCOL`; if these differ, the client starts the process itself, as it does without a
spawner.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Text, from_line, to_line
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.linux.processes import wait_readable
from bootseer.served.control import is_trusted_peer, short_address
from bootseer.served.processes import ROLES, SPAWNER, Role

_log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the plans; raise it if two releases cannot use each other's plans."""
_ANSWER_S = 5.0
_END_S = 10.0
_REQUEST_BYTES_MAX = 128 * 1024
_ANSWER_BYTES_MAX = 4096
_DESCRIPTORS = 3
"""Number of descriptors: the process's plan, its log, and its report."""
_warned = threading.Event()


class _ProtocolHeader(Struct, frozen=True):
    """Common member of all messages in every protocol version."""

    protocol: int = 0


class SpawnRequest(Struct, frozen=True):
    """Request to begin a process, by the module of its role."""

    protocol: int
    module: Text
    environment: dict[Text, Text]


class _SpawnAnswer(Struct, frozen=True):
    protocol: int = PROTOCOL
    pid: int = 0
    has_ended: bool = False
    failure: str = ""


class Spawned:
    """A process that the spawner has begun for this one; a `processes.Carrier`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._has_ended = False

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process, or the spawner, ends within `timeout_s`. Idempotent."""
        if not self._has_ended and wait_readable([self._connection.fileno()], timeout_s):
            self._has_ended = True
            self._connection.close()
        return self._has_ended

    def end(self) -> None:
        """Tell the spawner to kill the process. Idempotent."""
        if not self._has_ended:
            with contextlib.suppress(OSError):
                self._connection.send(b"k")
            self.wait(_END_S)
            self._connection.close()
            self._has_ended = True


def ask_spawner(
    address: Path, role: Role, environment: Mapping[str, str], files: Sequence[int]
) -> Spawned | None:
    """Ask the spawner at `address` to begin a process with these descriptors as 0 to 3.

    Return None, after one warning per process, if no spawner answers or it has another protocol.

    Raises: UnavailableError if the spawner cannot start the process.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        theirs = {name: text for name, text in environment.items() if name != SPAWNER}
        request = SpawnRequest(PROTOCOL, role.module, theirs)
        connection.settimeout(_ANSWER_S)
        with short_address(address) as short:
            connection.connect(short)
        if not is_trusted_peer(connection):
            raise PermissionError("its socket belongs to another user")
        plan, sink, _, report = files
        socket.send_fds(connection, [to_line(request).encode()], [plan, sink, report])
        answer = _receive(connection)
    except (OSError, CorruptError, UnknownFormatError) as error:
        connection.close()
        if not _warned.is_set():
            _warned.set()
            _log.warning(
                "cannot use the spawner at %s (%s): servers will end with this container",
                address,
                error,
            )
        return None
    if answer.failure:
        connection.close()
        raise UnavailableError(
            f"the spawner at {address} cannot start {role.title}: {answer.failure}"
        )
    return Spawned(connection, answer.pid)


def is_answering(address: Path) -> bool:
    """Return whether a spawner of any release answers a request that it must refuse."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
        short_address(address) as short,
    ):
        connection.settimeout(_ANSWER_S)
        connection.connect(short)
        connection.send(b"?")
        return bool(connection.recv(_ANSWER_BYTES_MAX))
    return False


def _receive(connection: socket.socket) -> _SpawnAnswer:
    data = connection.recv(_ANSWER_BYTES_MAX)
    _check_protocol(data)
    return from_line(data, _SpawnAnswer)


def _check_protocol(data: bytes) -> None:
    theirs = from_line(data, _ProtocolHeader).protocol
    if theirs != PROTOCOL:
        raise UnknownFormatError(
            f"it is of another release, with protocol {theirs} instead of {PROTOCOL}; "
            "drain the node, and delete its pod of bootseer-mounts"
        )


# ---- the spawner's side; all functions raise OSError ------------------------------------------


def receive_request(connection: socket.socket) -> tuple[SpawnRequest, list[int]]:
    """Return a checked request and its descriptors. Raises: OSError, BootseerError."""
    # Read before any check: with unread data on the connection, a client gets no answer.
    data, fds, flags, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, _DESCRIPTORS)
    try:
        if not is_trusted_peer(connection):
            raise InvalidInputError("not permitted")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != _DESCRIPTORS:
            raise InvalidInputError("the request is too long, or lacks its descriptors")
        _check_protocol(data)
        request = from_line(data, SpawnRequest)
        if request.module not in ROLES:
            raise InvalidInputError("the module is not one of Bootseer's roles")
        if any("=" in name or not name for name in request.environment):
            raise InvalidInputError("an environment variable has an invalid name")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return request, fds


def answer_started(connection: socket.socket, pid: int) -> None:
    """Tell the client the pid of its process."""
    connection.send(to_line(_SpawnAnswer(pid=pid)).encode())


def answer_ended(connection: socket.socket) -> None:
    """Tell the client that its process has ended."""
    connection.send(to_line(_SpawnAnswer(has_ended=True)).encode())


def answer_failed(connection: socket.socket, failure: str) -> None:
    """Tell the client why its process cannot be started."""
    connection.send(to_line(_SpawnAnswer(failure=failure)).encode())
