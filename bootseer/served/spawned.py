"""Processes of ours that another process starts: the spawner, whose socket BOOTSEER_SPAWNER names.

A program in a container takes what it has forked along when the container ends. What it asks the
spawner for lives in the spawner's container, and outlives it. Alone owns the exchange, both sides
of it: a request, with three descriptors, is one message on a connection of its own; the answers are
the process's id, then its exit code, a line each. A byte from the client ends the process; a client
that hangs up lets it live. Any thread.

The spawner's container may be of another release than a client's: it is replaced later. What it
starts is of its own release, and is handed plans of the client's. So both say their `PROTOCOL`, and
where these differ nothing is started: the client does so itself, as where there is no spawner.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated

from msgspec import Meta, Struct

from bootseer.base.documents import Text, from_line, to_line
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.linux.processes import wait_readable
from bootseer.linux.scripts import python_environment
from bootseer.served.background import SPAWNER
from bootseer.served.control import is_trusted_peer, short_address

_log = logging.getLogger(__name__)

PROTOCOL = 1
"""Raised where servers of the release before cannot be handed what clients hand them now, or the
reverse: members that both need have come or gone, or mean something else."""
_ANSWER_S = 5.0
_END_S = 10.0
_REQUEST_BYTES_MAX = 128 * 1024
_ANSWER_BYTES_MAX = 4096
_DESCRIPTORS = 3
"""The process's input, its output, and what it inherits beside them."""
_OURS = re.compile(r"bootseer(\.[a-z][a-z0-9_]*)+")
_warned = threading.Event()


class _Head(Struct, frozen=True):
    """What every message has, of whichever protocol it is."""

    protocol: int = 0


class SpawnRequest(Struct, frozen=True):
    """A program of ours to start: `python -m MODULE ARGUMENTS... DESCRIPTOR`."""

    protocol: int
    module: Text
    arguments: Annotated[tuple[Text, ...], Meta(max_length=16)]
    environment: dict[Text, Text]


class _Answer(Struct, frozen=True):
    protocol: int = PROTOCOL
    pid: int = 0
    code: int | None = None
    failure: str = ""


class Spawned:
    """What `subprocess.Popen` is to a process that this one has started: as much of it as is
    needed."""

    def __init__(self, connection: socket.socket, pid: int, stdin: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._connection = connection

    def kill(self) -> None:
        """Have the spawner end it with SIGKILL. Nothing where it was waited for already."""
        if self.returncode is None:
            with contextlib.suppress(OSError):
                self._connection.send(b"k")

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; that of a killed one where the spawner is gone, or does not tell for
        longer than it may take. Raises: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not wait_readable(
                [self._connection.fileno()], _END_S if timeout is None else timeout
            ):
                if timeout is not None:
                    raise subprocess.TimeoutExpired([], timeout)
            else:
                with contextlib.suppress(OSError, CorruptError):
                    self.returncode = _receive(self._connection).code
            self._connection.close()
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code; None while it lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None


def ask_spawner(
    address: Path,
    module: str,
    arguments: Sequence[str],
    sink: int,
    fd: int,
    variables: Mapping[str, str | None],
    *,
    has_input: bool,
) -> Spawned | None:
    """Have the spawner at `address` start `module`, with the inherited descriptor's number as its
    last argument; None where none answers, or one of another protocol, which costs one warning.

    Raises: UnavailableError where the spawner cannot start it.
    """
    theirs, ours = os.pipe2(os.O_CLOEXEC) if has_input else (_open_nothing(), -1)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        environment = python_environment(variables)
        del environment[SPAWNER]
        request = SpawnRequest(PROTOCOL, module, tuple(arguments), environment)
        connection.settimeout(_ANSWER_S)
        with short_address(address) as short:
            connection.connect(short)
        if not is_trusted_peer(connection):
            raise PermissionError("another user listens there")
        socket.send_fds(connection, [to_line(request).encode()], [theirs, sink, fd])
        answer = _receive(connection)
    except (OSError, CorruptError, UnknownFormatError) as error:
        connection.close()
        if ours >= 0:
            os.close(ours)
        if not _warned.is_set():
            _warned.set()
            _log.warning(
                "the spawner at %s cannot be asked (%s): servers end with this container",
                address,
                error,
            )
        return None
    finally:
        os.close(theirs)
    if answer.failure:
        connection.close()
        if ours >= 0:
            os.close(ours)
        raise UnavailableError(f"the spawner at {address} cannot start {module}: {answer.failure}")
    return Spawned(connection, answer.pid, os.fdopen(ours, "wb") if ours >= 0 else None)


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


def _open_nothing() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


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
        if not _OURS.fullmatch(request.module):
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


def answer_ended(connection: socket.socket, code: int) -> None:
    """Raises: OSError."""
    connection.send(to_line(_Answer(code=code)).encode())


def answer_failed(connection: socket.socket, failure: str) -> None:
    """Raises: OSError."""
    connection.send(to_line(_Answer(failure=failure)).encode())
