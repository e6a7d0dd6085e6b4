"""Saying that a start is over, to servers that a job cannot otherwise reach: an abstract socket,
which a container sees as long as it shares the host's network.

Alone owns the exchange, both sides. All users see the names of abstract sockets
(/proc/net/unix), so what counts is the secret in the message, which only the job's environment
holds: an entry of `BOOTSEER_READY_SOCKETS` is `NAME:SECRET`. Any thread.
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
"""Taken at a time: a flood must not keep who listens from its other work."""


def new_ready_name() -> str:
    """An entry for a new socket."""
    return f"bootseer-ready-{os.urandom(8).hex()}:{os.urandom(16).hex()}"


def add_ready_names(environ: MutableMapping[str, str], *entries: str) -> None:
    """Have whoever gets these variables tell the sockets of `entries`, too."""
    known = [entry for entry in environ.get(VARIABLE, "").split(",") if entry]
    if added := [entry for entry in entries if entry not in known]:
        environ[VARIABLE] = ",".join([*known, *added])


class ReadySocket:
    """Listens as an entry says, until closed."""

    def __init__(self, entry: str) -> None:
        """Where another process has taken the name, no job is heard."""
        import socket

        name, _, secret = entry.partition(":")
        self._expected = b" ".join((_MESSAGE, secret.encode()))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind("\0" + name)
        except OSError as error:
            _log.warning("cannot listen for bootseer.ready(): %s", error)

    def fileno(self) -> int:
        """Readable when there is something to `take`."""
        return self._socket.fileno()

    def take(self) -> bool:
        """Whether the job said so. Never waits, never raises."""
        import hmac  # here: who starts a server need not load it

        with contextlib.suppress(BlockingIOError):
            for _ in range(_MESSAGES_MAX):
                if hmac.compare_digest(self._socket.recv(_MESSAGE_BYTES_MAX), self._expected):
                    return True
        return False

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def tell_ready() -> None:
    """Tell all servers that this process's environment names. Never raises."""
    import socket  # here, as above: every start loads this module

    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, secret = entry.partition(":")
        message = b" ".join((_MESSAGE, secret.encode()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.setblocking(False)
                peer.sendto(message, b"\0" + name.encode())
        except OSError as error:
            # The entry is a secret.
            _log.debug("nobody listens for ready at %s: %s", name, error)
