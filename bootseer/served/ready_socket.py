"""Message from a job to the node's servers that the job is ready, by abstract sockets.

A container sees the host's abstract sockets as long as it shares the host's network. Only this
module implements both sides. All users see the names of such sockets (/proc/net/unix), so a message
must contain a secret that only the job's environment has: an entry of `BOOTSEER_READY_SOCKETS` is
`NAME:SECRET`. Any thread.
"""

import contextlib
import logging
import os
from collections.abc import MutableMapping

_log = logging.getLogger(__name__)

VARIABLE = "BOOTSEER_READY_SOCKETS"
_MESSAGE = b"ready"
_MESSAGE_BYTES_MAX = 128
_MESSAGES_MAX = 64
"""Messages read at a time, so that a flood does not keep the listener from its other work."""


def new_ready_name() -> str:
    """Return an entry for a new socket."""
    return f"bootseer-ready-{os.urandom(8).hex()}:{os.urandom(16).hex()}"


def add_ready_names(environ: MutableMapping[str, str], *entries: str) -> None:
    """Add `entries` to the variable, so that the programs that get it notify these sockets, too."""
    known = [entry for entry in environ.get(VARIABLE, "").split(",") if entry]
    if added := [entry for entry in entries if entry not in known]:
        environ[VARIABLE] = ",".join([*known, *added])


class ReadySocket:
    """Listener for one entry."""

    def __init__(self, entry: str) -> None:
        """Bind the socket. If another process has the name, no message will arrive."""
        import socket

        name, _, secret = entry.partition(":")
        self._expected = b" ".join((_MESSAGE, secret.encode()))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind("\0" + name)
        except OSError as error:
            _log.warning("cannot listen for bootseer.ready(): %s", error)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are messages to `take`."""
        return self._socket.fileno()

    def take(self) -> bool:
        """Read the messages. Return whether the job was ready. Never waits, never raises."""
        import hmac  # here, since the program that starts a server does not need it

        with contextlib.suppress(BlockingIOError):
            for _ in range(_MESSAGES_MAX):
                if hmac.compare_digest(self._socket.recv(_MESSAGE_BYTES_MAX), self._expected):
                    return True
        return False

    def close(self) -> None:
        self._socket.close()


def send_ready() -> None:
    """Notify all sockets that this process's environment names. Never raises."""
    import socket  # here, since every start loads this module

    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, secret = entry.partition(":")
        message = b" ".join((_MESSAGE, secret.encode()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.setblocking(False)
                peer.sendto(message, b"\0" + name.encode())
        except OSError as error:
            # Log the name alone: the entry has a secret.
            _log.debug("nobody listens for ready at %s: %s", name, error)
