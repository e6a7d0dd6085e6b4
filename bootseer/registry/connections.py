"""One connection to a server: an answer's head in time, and a look at who has answered.

With `transport` the only place that uses urllib3. Thread-safe: classes and functions only.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import urllib3

from bootseer.transfer.pace import STALL_S

CONNECT_S = 10.0
"""A TCP handshake takes three packets; two of them may be lost (1 s and 2 s) and more."""

_Result = TypeVar("_Result")


def _in_time(sock: socket.socket, function: Callable[[], _Result], seconds: float) -> _Result:
    """What `function`, which reads from `sock`, returns; after `seconds` it finds the end there.

    A socket's own time-out starts again with every byte.
    """

    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            # Not the method of an SSL socket, which would change it under its reader.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        result = function()
    except Exception:
        # Whatever the shut socket made of itself in the libraries.
        if late.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()
    with contextlib.suppress(OSError):  # closed already, where no body follows
        # From here on only the body is waited for.
        sock.settimeout(min(STALL_S, seconds))
    return result


class Guarded(Protocol):
    """A connection to a registry, as far as a guard looks at it."""

    host: str
    port: int


Guard = Callable[[Guarded, socket.socket], None]
"""Looks at a new connection. Raises: PermissionDeniedError."""


class _Connection(urllib3.connection.HTTPConnection):
    guard: Guard

    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        type(self).guard(self, sock)
        return sock

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as its base
        return _in_time(self.sock, super().getresponse, self.timeout or CONNECT_S)


class _SecureConnection(urllib3.connection.HTTPSConnection):
    guard: Guard

    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        type(self).guard(self, sock)
        return sock

    def connect(self) -> None:
        super().connect()
        # The author of `skip_verify` knows; urllib3 would warn at each request.
        self.is_verified = True

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as its base
        return _in_time(self.sock, super().getresponse, self.timeout or CONNECT_S)


def pool_classes(guard: Guard) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Pools whose new connections `guard` looks at."""

    class Plain(_Connection):
        pass

    class Secure(_SecureConnection):
        pass

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Secure

    Plain.guard = Secure.guard = staticmethod(guard)
    return {"http": Pool, "https": SecurePool}
