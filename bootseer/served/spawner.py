"""The exchange with the spawner: a process that begins ours in the place of their callers.

BOOTSEER_SPAWNER names its socket.

A program in a container takes what it has forked along when the container ends. What it asks the
spawner for lives in the spawner's container, and outlives it. Alone owns the exchange, both sides
of it: a request, with three descriptors, is one message on a connection of its own; the answers are
the process's id, then that it has ended, a line each. A byte from the client ends the process; a
client that hangs up lets it live. Any thread.

The spawner's container may be of another release than a client's: it is replaced later. What it
starts is of its own release, and is handed plans of the client's. So both say their `PROTOCOL`, and
where these differ nothing is started: the client does so itself, as where there is no spawner.
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
"""Raised where servers of the release before cannot be handed what clients hand them now, or the
reverse: members that both need have come or gone, or mean something else."""
_ANSWER_S = 5.0
_END_S = 10.0
_REQUEST_BYTES_MAX = 128 * 1024
_ANSWER_BYTES_MAX = 4096
_DESCRIPTORS = 3
"""Of the process's plan, its log, and its report."""
_warned = threading.Event()


class _Head(Struct, frozen=True):
    """What every message has, of whichever protocol it is."""

    protocol: int = 0


class SpawnRequest(Struct, frozen=True):
    """A process of ours to begin, by the module of its role."""

    protocol: int
    module: Text
    environment: dict[Text, Text]


class _Answer(Struct, frozen=True):
    protocol: int = PROTOCOL
    pid: int = 0
    has_ended: bool = False
    failure: str = ""


class Spawned:
    """A process that the spawner has begun for this one (`processes.Carrier`)."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._has_ended = False

    def wait(self, timeout_s: float) -> bool:
        """Return whether it ends in time, or the spawner is gone. Idempotent."""
        if not self._has_ended and wait_readable([self._connection.fileno()], timeout_s):
            self._has_ended = True
            self._connection.close()
        return self._has_ended

    def end(self) -> None:
        """Have the spawner end it with SIGKILL. Idempotent."""
        if not self._has_ended:
            with contextlib.suppress(OSError):
                self._connection.send(b"k")
            self.wait(_END_S)
            self._connection.close()
            self._has_ended = True


def ask_spawner(
    address: Path, role: Role, environment: Mapping[str, str], files: Sequence[int]
) -> Spawned | None:
    """Have the spawner at `address` begin a process with these descriptors as 0 to 3; None where
    none answers, or one of another protocol, which costs one warning.

    Raises: UnavailableError where the spawner cannot start it.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        theirs = {name: text for name, text in environment.items() if name != SPAWNER}
        request = SpawnRequest(PROTOCOL, role.module, theirs)
        connection.settimeout(_ANSWER_S)
        with short_address(address) as short:
            connection.connect(short)
        if not is_trusted_peer(connection):
            raise PermissionError("another user listens there")
        plan, sink, _, report = files
        socket.send_fds(connection, [to_line(request).encode()], [plan, sink, report])
        answer = _receive(connection)
    except (OSError, CorruptError, UnknownFormatError) as error:
        connection.close()
        if not _warned.is_set():
            _warned.set()
            _log.warning(
                "the spawner at %s cannot be asked (%s): servers end with this container",
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


def answers(address: Path) -> bool:
    """Whether a spawner, of any release, answers at `address`: a request that it must refuse."""
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


def _receive(connection: socket.socket) -> _Answer:
    data = connection.recv(_ANSWER_BYTES_MAX)
    _check_protocol(data)
    return from_line(data, _Answer)


def _check_protocol(data: bytes) -> None:
    """Raises: UnknownFormatError, CorruptError."""
    theirs = from_line(data, _Head).protocol
    if theirs != PROTOCOL:
        raise UnknownFormatError(
            f"it is of another release, whose protocol is {theirs} where ours is {PROTOCOL}; "
            "drain the node, and delete its pod of bootseer-mounts"
        )


# ---- the spawner's side -----------------------------------------------------------------------


def receive_request(connection: socket.socket) -> tuple[SpawnRequest, list[int]]:
    """A request, checked, and its descriptors, which the caller closes. Raises: OSError,
    BootseerError."""
    # Read in any case: a client of which something is left unread gets no answer.
    data, fds, flags, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, _DESCRIPTORS)
    try:
        if not is_trusted_peer(connection):
            raise InvalidInputError("not permitted")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != _DESCRIPTORS:
            raise InvalidInputError("the request is too long, or lacks its descriptors")
        _check_protocol(data)
        request = from_line(data, SpawnRequest)
        if request.module not in ROLES:
            raise InvalidInputError("the program is none of Bootseer's")
        if any("=" in name or not name for name in request.environment):
            raise InvalidInputError("a variable has no name that a program could have")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return request, fds


def answer_started(connection: socket.socket, pid: int) -> None:
    """Raises: OSError."""
    connection.send(to_line(_Answer(pid=pid)).encode())


def answer_ended(connection: socket.socket) -> None:
    """Raises: OSError."""
    connection.send(to_line(_Answer(has_ended=True)).encode())


def answer_failed(connection: socket.socket, failure: str) -> None:
    """Raises: OSError."""
    connection.send(to_line(_Answer(failure=failure)).encode())
