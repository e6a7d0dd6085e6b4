"""One connection to a server: an answer's head in time, and a look at who has answered.

With `transport`, and with `kubernetes.api`, the only place that uses urllib3. Thread-safe.
"""

import contextlib
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import urllib3

from bootseer.errors import UnavailableError
from bootseer.transfer.pace import STALL_S

CONNECT_S = 10.0
"""A TCP handshake takes three packets; two of them may be lost (1 s and 2 s) and more."""

_CONNECTS_MAX = 4
"""How many times as long as a handshake of TCP all of them may take: with several addresses of a
name, a proxy and TLS."""

_Result = TypeVar("_Result")


class Watchdog:
    """Ends what lasts too long: one thread, started when it is needed, for any number of waits."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start without a thread, as a forked child has to."""
        self._changed = threading.Condition(threading.Lock())
        self._waits: dict[int, tuple[float, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._wakes_s = math.inf
        self._has_thread = False

    @contextlib.contextmanager
    def within(self, seconds: float, end: Callable[[], None]) -> Iterator[None]:
        """Call `end`, in the watchdog's thread, if the `with` block lasts longer. `end` must not
        wait. Raises: UnavailableError when no thread can be started."""
        ends_s = time.monotonic() + seconds
        with self._changed:
            if not self._has_thread:
                try:
                    threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
                except RuntimeError as error:
                    raise UnavailableError(
                        f"cannot start a thread ({error}): raise the limit of processes (ulimit "
                        "-u, or pids.max of the cgroup) or free memory"
                    ) from error
                self._has_thread = True
            number = next(self._numbers)
            self._waits[number] = (ends_s, end)
            # Most waits end later than the one before: the thread sleeps on.
            if ends_s < self._wakes_s:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waits.pop(number, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                late = [number for number, (ends_s, _) in self._waits.items() if ends_s <= now_s]
                for number in late:
                    with contextlib.suppress(Exception):
                        self._waits.pop(number)[1]()
                left = (ends_s for ends_s, _ in self._waits.values())
                self._wakes_s = min(left, default=math.inf)
                is_idle = self._wakes_s == math.inf
                self._changed.wait(None if is_idle else max(0.0, self._wakes_s - now_s))


_WATCHDOG = Watchdog()
os.register_at_fork(after_in_child=_WATCHDOG.begin)


def _in_time(
    get_socket: Callable[[], socket.socket | None], function: Callable[[], _Result], seconds: float
) -> _Result:
    """Return what `function`, which uses a socket, returns; after `seconds` it finds the end there.

    A socket's own time-out starts again with every byte.
    """

    is_late = False

    def end() -> None:
        nonlocal is_late
        is_late = True
        sock = get_socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of an SSL socket, which would change it under its reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    try:
        with _WATCHDOG.within(seconds, end):
            result = function()
    except Exception:
        # Whatever the shut socket made of itself in the libraries.
        if not is_late:
            raise
    else:
        if not is_late:
            return result
        # For http.client, headers that break off are whole.
        if isinstance(result, urllib3.HTTPResponse):
            result.close()
    raise TimeoutError(f"no answer within {seconds:g} s")


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
        return _head_of(self, super().getresponse)


class _SecureConnection(urllib3.connection.HTTPSConnection):
    guard: Guard

    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        type(self).guard(self, sock)
        return sock

    def connect(self) -> None:
        # A proxy's answer has lines without end, and each of them a time-out of its own.
        _in_time(lambda: self.sock, super().connect, _CONNECTS_MAX * (self.timeout or CONNECT_S))
        # The author of `skip_verify` knows; urllib3 would warn at each request.
        self.is_verified = True

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as its base
        return _head_of(self, super().getresponse)


def _head_of(
    connection: _Connection | _SecureConnection, getresponse: Callable[[], urllib3.HTTPResponse]
) -> urllib3.HTTPResponse:
    """Return the answer on a connection, whose head has to be there within its time-out."""
    sock, seconds = connection.sock, connection.timeout or CONNECT_S
    response = _in_time(lambda: sock, getresponse, seconds)
    with contextlib.suppress(OSError):  # closed already, where no body follows
        # From here on only the body is waited for.
        sock.settimeout(min(STALL_S, seconds))
    return response


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
