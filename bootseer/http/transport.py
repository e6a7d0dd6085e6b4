"""Requests to one HTTP server, and to servers that it redirects to.

Uses urllib3 for connections, certificates and proxies, and keeps four rules for every caller:

- Every wait has a deadline. The head of an answer must come within the deadline even if it
  trickles: a socket's own time-out restarts with every byte, so a watchdog thread ends requests
  that last too long. The reader of a body limits its waits.
- The address of every new connection is checked before anything is sent to it, unless it is the
  server's own (`addresses.may_redirect`). An earlier resolution of the name does not count.
- No redirect leads from TLS to plain HTTP, except on this machine.
- `HttpServer.headers` and logins are sent to the server only, never to another one.

Each request is sent once; callers repeat it. Thread-safe; a `Response` is for one thread. Messages
show only the host of a URL, because the rest may be secret.
"""

import contextlib
import email.utils
import io
import itertools
import logging
import math
import os
import queue
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3
from msgspec import Struct
from urllib3 import exceptions

from bootseer.base.closing import Closing
from bootseer.base.requests import HTTP, count_request
from bootseer.base.wait_budget import RefusedError, WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.http.addresses import Reach, is_loopback, literal_reach, may_redirect, reach_of
from bootseer.transfer.pace import STALL_S, ByteProgress, floor_bytes_per_s

# urllib3 logs whole URLs, and the URL of a redirect may be secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL + 1)

CONNECT_S = 10.0
"""Deadline of a TCP handshake: enough for two lost packets, repeated after 1 s and 2 s."""
_CONNECTS_MAX = 4
"""Handshakes that the deadline of a whole connection allows for: several addresses of a name, a
proxy, and TLS."""
_CONNECTIONS_MAX = 32
_PIECE_BYTES = 2**20
_AT_ONCE_BYTES = 64 * 1024
_REDIRECTS_MAX = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

_Result = TypeVar("_Result")


class HttpServer(Struct, frozen=True):
    """Address of an HTTP server, and the settings for connections to it."""

    name: str
    """Name in messages, mostly host[:port]."""
    base_url: str
    """URL whose scheme, host and port are used."""
    verify: bool = True
    """Whether the server's certificate is verified."""
    ca_files: tuple[Path, ...] = ()
    """Certificate authorities that are trusted besides the system's."""
    trusts_ca_files_alone: bool = False
    """Whether only `ca_files` are trusted. Old authorities are accepted then as well: many lack an
    extension that Python requires since 3.13."""
    client_certificates: tuple[tuple[Path, Path | None], ...] = ()
    """(certificate, key); the key is None if it is in the certificate's file."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of each request to this server, which no other server gets."""
    connect_s: float | None = None
    """Deadline of a TCP handshake; None: `CONNECT_S`."""
    proxy: str | None = None
    """URL of a proxy; "" for a direct connection; None: the environment's proxy."""
    ca_advice: str = ""
    """Advice in messages about an untrusted certificate."""


# ---- connections --------------------------------------------------------------------------------


class Watchdog:
    """Thread that ends waits which last too long. It is started with the first wait."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to the state without a thread, which a forked child needs."""
        self._changed = threading.Condition(threading.Lock())
        self._waits: dict[int, tuple[float, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._wakes_s = math.inf
        self._has_thread = False

    @contextlib.contextmanager
    def within(self, seconds: float, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` in the watchdog's thread if the `with` block lasts longer than `seconds`.

        `end` must not wait. Raises: UnavailableError if no thread can be started.
        """
        ends_s = time.monotonic() + seconds
        with self._changed:
            if not self._has_thread:
                _start_thread(self._watch, "watchdog")
                self._has_thread = True
            number = next(self._numbers)
            self._waits[number] = (ends_s, end)
            # Most waits end later than earlier ones, and need not wake the thread.
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
os.register_at_fork(after_in_child=_WATCHDOG.reset)


def _in_time(
    get_socket: Callable[[], socket.socket | None], function: Callable[[], _Result], seconds: float
) -> _Result:
    """Return the result of `function`; shut down its socket after `seconds`."""
    is_late = False

    def end() -> None:
        nonlocal is_late
        is_late = True
        sock = get_socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                # The method of an SSL socket would change the socket's state under its reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    try:
        with _WATCHDOG.within(seconds, end):
            result = function()
    except Exception:
        # A shut socket causes any kind of error in the libraries.
        if not is_late:
            raise
    else:
        if not is_late:
            return result
        # http.client takes headers that break off for complete ones.
        if isinstance(result, urllib3.HTTPResponse):
            result.close()
    raise TimeoutError(f"no answer within {seconds:g} s")


def _start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread. Raises: UnavailableError if the system allows no more threads."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot start a thread ({error}): raise the limit of processes (ulimit -u, or "
            "pids.max of the cgroup) or free memory"
        ) from error


def _connected(connect: Callable[[], socket.socket], seconds: float) -> socket.socket:
    """Return the socket that `connect` opens, within `seconds`.

    `connect` runs in a thread of its own, because a name lookup cannot be interrupted. Raises:
    urllib3's ConnectTimeoutError; as `connect`.
    """
    results: queue.SimpleQueue[socket.socket | BaseException] = queue.SimpleQueue()
    # Taken by the first of both threads: the waiter that gives up, or the thread that is done.
    is_decided = threading.Lock()

    def run() -> None:
        try:
            result: socket.socket | BaseException = connect()
        except BaseException as error:
            result = error
        results.put(result)
        if not is_decided.acquire(blocking=False) and isinstance(result, socket.socket):
            result.close()

    _start_thread(run, "bootseer-connect")
    try:
        result = results.get(timeout=seconds)
    except queue.Empty:
        if is_decided.acquire(blocking=False):
            raise exceptions.ConnectTimeoutError(None, f"after {seconds:g} s") from None
        result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result


_Guard = Callable[[str, int, socket.socket], None]
"""Checks a new connection to (host, port). Raises: PermissionDeniedError."""


class _GuardedConnection:
    """Mixin of connections that a guard checks, and whose answers begin within a deadline."""

    guard: _Guard
    host: str
    port: int
    sock: socket.socket | None
    timeout: float | None

    def _new_conn(self) -> socket.socket:
        connect = super()._new_conn  # type: ignore[misc]  # urllib3's
        if literal_reach(self.host.strip("[]")) is None:
            sock = _connected(connect, _CONNECTS_MAX * (self.timeout or CONNECT_S))
        else:
            sock = connect()
        type(self).guard(self.host, self.port, sock)
        return sock

    def getresponse(self) -> urllib3.HTTPResponse:
        sock, seconds = self.sock, self.timeout or CONNECT_S
        head = super().getresponse  # type: ignore[misc]  # urllib3's
        response: urllib3.HTTPResponse = _in_time(lambda: sock, head, seconds)
        if sock is not None:
            with contextlib.suppress(OSError):  # Closed already if there is no body.
                # From here on the time-out applies to reads of the body.
                sock.settimeout(min(STALL_S, seconds))
        return response


class _PlainConnection(_GuardedConnection, urllib3.connection.HTTPConnection):  # type: ignore[misc]
    pass


class _SecureConnection(_GuardedConnection, urllib3.connection.HTTPSConnection):  # type: ignore[misc]
    def connect(self) -> None:
        # A proxy may send any number of lines, each within the socket's own time-out.
        _in_time(lambda: self.sock, super().connect, _CONNECTS_MAX * (self.timeout or CONNECT_S))
        # Else urllib3 would warn at each request to a server with `verify=False`.
        self.is_verified = True


def _pool_classes(guard: _Guard) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Return pools of connections that `guard` checks, by scheme."""
    own = {"guard": staticmethod(guard)}

    class GuardedPool(urllib3.HTTPConnectionPool):
        ConnectionCls = type("Plain", (_PlainConnection,), own)

    class GuardedSecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = type("Secure", (_SecureConnection,), own)

    return {"http": GuardedPool, "https": GuardedSecurePool}


# ---- requests -----------------------------------------------------------------------------------


class Response(Closing):
    """Answer whose body is read piece by piece. Close it unless it was read to its end."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, url: str, wait_budget: WaitBudget) -> None:
        self._raw = raw
        self._wait_budget = wait_budget
        self.url = url
        """URL of the request; secret if it comes from a redirect."""
        self.server = _netloc(url)
        """The server that answered, for messages."""
        self.status = raw.status
        self.headers: Mapping[str, str] = raw.headers

    def wait_at_most(self, seconds: float) -> None:
        """Limit each wait for bytes of the body to `seconds`."""
        sock = getattr(self._raw.connection, "sock", None)
        if sock is not None:
            sock.settimeout(seconds)

    def read(self, size_bytes: int) -> bytes:
        """Return the bytes that have arrived, at most `size_bytes`; b"" at the end.

        Raises: UnavailableError if the body is cut off; DeadlineError if no bytes come.
        """
        began_s = time.monotonic()
        try:
            # By its type `read1` may return None; its code never does.
            return self._raw.read1(size_bytes, decode_content=False) or b""
        except (exceptions.HTTPError, OSError, ValueError) as error:
            self._wait_budget.spend(time.monotonic() - began_s)
            raise _error(error, self.server) from error

    def read_all(self, size_max_bytes: int, deadline_s: float) -> bytes:
        """Return the whole body.

        Args:
            size_max_bytes: Size of the largest body that is accepted.
            deadline_s: Longest time without bytes, if that is less than `STALL_S`; bytes below
                the rate of `pace.floor_bytes_per_s` count as none.

        Raises: CorruptError if the body is larger; DeadlineError; UnavailableError, as `read`.
        """
        # Bounded as a range of a file is (`http.ranges`); the head may not announce a length.
        announced_bytes: int | None = getattr(self._raw, "length_remaining", None)
        length = size_max_bytes if announced_bytes is None else min(announced_bytes, size_max_bytes)
        progress = ByteProgress(time.monotonic(), floor_bytes_per_s(length, deadline_s))
        stall_s = min(STALL_S, deadline_s)
        pieces: list[bytes] = []
        size_bytes = 0
        while data := self.read(_PIECE_BYTES):
            pieces.append(data)
            size_bytes += len(data)
            if size_bytes > size_max_bytes:
                self.close()
                raise CorruptError(f"{self.server} sent more than {size_max_bytes} bytes")
            if progress.silent_s(size_bytes, time.monotonic()) > stall_s:
                self.close()
                raise DeadlineError(f"{self.server} sent almost nothing for {stall_s:g} s")
        return b"".join(pieces)

    def unavailable(self, message: str) -> UnavailableError:
        """Return an UnavailableError with the answer's `Retry-After`."""
        error = UnavailableError(message)
        error.retry_after_s = retry_after_s(self.headers.get("Retry-After"), datetime.now(UTC))
        return error

    def close(self) -> None:
        """Close the connection unless the body was read to its end. Idempotent, never raises."""
        self._raw.close()


class _DeadlineBody(io.RawIOBase):
    """Body of a request that must be sent within a deadline.

    Without it, a server that takes a byte now and then would hold the sender for ever.
    """

    def __init__(self, body: BinaryIO, server: str, seconds: float) -> None:
        super().__init__()
        self._body = body
        self._server = server
        self._seconds = seconds
        self._ends_s = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return bytes of the body. Raises: DeadlineError."""
        if time.monotonic() > self._ends_s:
            raise DeadlineError(f"{self._server} did not take the body within {self._seconds:g} s")
        return self._body.read(size)


class Transport(Closing):
    """Connections to one `HttpServer`, and to servers that it redirects to."""

    def __init__(
        self, server: HttpServer, deadline_s: float, wait_budget: WaitBudget | None = None
    ) -> None:
        """Make a transport; no server is asked.

        Args:
            server: The server.
            deadline_s: Deadline of the head of an answer, and of sending a body.
            wait_budget: Seconds that all unsuccessful requests may take together.
        """
        self._server = server
        self._deadline_s = deadline_s
        self._wait_budget = wait_budget or WaitBudget()
        parts = urlsplit(server.base_url)
        self._origin = (parts.scheme, parts.netloc)
        port = parts.port or urllib3.connection.port_by_scheme[parts.scheme]
        self._own = ((parts.hostname or "").lower(), port)
        # Until its address is known (never, behind a proxy): the reach that may redirect least.
        self._own_reach = literal_reach(self._own[0]) or Reach.EVERYBODY
        self._managers: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def is_own(self, url: str) -> bool:
        """Return whether `url` is on the server itself."""
        return urlsplit(url)[:2] == self._origin

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | BinaryIO | None = None,
        *,
        more_s: float = 0.0,
    ) -> Response:
        """Send one request and return the answer, which may be a redirect.

        The headers of the server are not added. The answer's head may come `more_s` after the
        deadline.

        Raises: UnavailableError, DeadlineError; PermissionDeniedError for an untrusted certificate,
        or a server that this one may not redirect to; InvalidInputError.
        """
        parts = urlsplit(url)
        reach = literal_reach(parts.hostname or "")
        if reach is not None and (parts.hostname or "") != self._own[0]:
            self._check(reach, parts.hostname or "")
        server = _netloc(url)
        given = {"Accept-Encoding": "identity", "User-Agent": "bootseer", **headers}
        sent: bytes | _DeadlineBody | None
        if body is None or (isinstance(body, bytes) and len(body) <= _AT_ONCE_BYTES):
            sent = body
        else:
            if isinstance(body, bytes):
                # Sent in pieces, because a socket's time-out covers everything sent at once.
                given.setdefault("Content-Length", str(len(body)))
                body = io.BytesIO(body)
            sent = _DeadlineBody(body, server, self._deadline_s + more_s)
        manager = self._manager(parts.scheme, parts.hostname or "")
        left_s = self._wait_budget.left_s
        if left_s <= 0:
            raise self._wait_budget.error(f"{server} was not asked: ")
        began_s = time.monotonic()
        count_request(HTTP)
        try:
            raw = manager.urlopen(
                method,
                url,
                body=sent,
                headers=given,
                redirect=False,
                retries=False,
                assert_same_host=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(
                    connect=min(self._server.connect_s or CONNECT_S, self._deadline_s, left_s),
                    read=min(self._deadline_s + more_s, left_s),
                ),
            )
        except (exceptions.HTTPError, OSError, ValueError) as error:
            self._wait_budget.spend(time.monotonic() - began_s)
            raise _error(error, server, self._server.ca_advice) from error
        self._wait_budget.answered()
        return Response(raw, url, self._wait_budget)

    def follow(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | BinaryIO | None = None,
        *,
        own_headers: Mapping[str, str] | None = None,
        more_s: float = 0.0,
    ) -> Response:
        """Send a request, follow redirects of GET and HEAD, and return the answer.

        `own_headers` and the server's headers are sent to the server itself only.

        Raises: as `request`; PermissionDeniedError for a redirect from TLS to plain HTTP.
        """
        for _ in range(_REDIRECTS_MAX):
            sent = dict(headers)
            if self.is_own(url):
                sent = {**dict(self._server.headers), **headers, **(own_headers or {})}
            response = self.request(method, url, sent, body, more_s=more_s)
            if response.status not in _REDIRECTS:
                return response
            response.close()
            url = joined(url, response.headers.get("Location", ""), self._server.name)
            if method not in ("GET", "HEAD") or urlsplit(url).scheme not in ("http", "https"):
                raise UnavailableError(f"{response.server} redirects to a URL that is not allowed")
        raise UnavailableError(f"{self._server.name} redirects without end")

    def _check(self, reach: Reach, server: str) -> None:
        """Raise PermissionDeniedError if a redirect to an address with `reach` is not allowed."""
        if not may_redirect(self._own_reach, reach):
            raise PermissionDeniedError(
                f"{self._server.name} sends us to {server}, which is in {reach}, and it is not "
                "there itself; refused"
            )

    def _guard(self, host: str, port: int, sock: socket.socket) -> None:
        address = str(sock.getpeername()[0])
        reach = reach_of(address)
        if (host.strip("[]").lower(), port) == self._own:
            self._own_reach = reach
            return
        try:
            self._check(reach, f"{host} ({address})")
        except BaseException:
            sock.close()
            raise

    def _manager(self, scheme: str, host: str) -> urllib3.PoolManager:
        proxy = self._server.proxy
        if proxy is None:
            proxy = proxy_for(scheme, host)
        # Plain HTTP needs no certificates, and must not fail if they cannot be read. A forked child
        # must not use connections of its parent.
        key = f"{os.getpid()} {scheme} {proxy}"
        with self._lock:
            manager = self._managers.get(key)
            if manager is None:
                context = self._context() if "https" in (scheme, urlsplit(proxy).scheme) else None
                manager = self._new_manager(proxy, context)
                self._managers[key] = manager
            return manager

    def _new_manager(self, proxy: str, context: ssl.SSLContext | None) -> urllib3.PoolManager:
        make = partial(urllib3.PoolManager, ssl_context=context, maxsize=_CONNECTIONS_MAX)
        if not proxy:
            manager = make()
            manager.pool_classes_by_scheme = _pool_classes(self._guard)
            return manager
        user = urlsplit(proxy)
        login = f"{user.username}:{user.password or ''}" if user.username else None
        manager = urllib3.ProxyManager(
            f"{user.scheme}://{_netloc(proxy)}",
            proxy_headers=urllib3.make_headers(proxy_basic_auth=login) if login else None,
            **make.keywords,
        )
        # The proxy resolves names, so their addresses cannot be checked here.
        manager.pool_classes_by_scheme = _pool_classes(lambda host, port, sock: None)
        return manager

    def _context(self) -> ssl.SSLContext:
        server, path = self._server, None
        try:
            if server.trusts_ca_files_alone:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            else:
                context = ssl.create_default_context()
            for path in server.ca_files:
                context.load_verify_locations(cafile=path)
            for path, key in server.client_certificates:
                context.load_cert_chain(path, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"cannot use the certificate {path} for {server.name}: {error}"
            ) from error
        if not server.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        with self._lock:
            managers, self._managers = self._managers, {}
        for manager in managers.values():
            manager.clear()


def _no_password() -> str:
    raise ValueError("its key is protected by a password")


def _netloc(url: str) -> str:
    """Return host and port of a URL, without a login."""
    return urlsplit(url).netloc.rpartition("@")[2]


def joined(base_url: str, path: str, server: str) -> str:
    """Return the absolute URL of a link that the `server` at `base_url` gave.

    Raises: UnavailableError if it is not a URL; PermissionDeniedError if it leads from TLS to plain
    HTTP.
    """
    try:
        url = urljoin(base_url, path)
        parts = urlsplit(url)
    except ValueError as error:
        raise UnavailableError(f"{server} redirects to an invalid URL") from error
    if base_url.startswith("https:") and parts.scheme == "http" and not is_loopback(parts.netloc):
        raise PermissionDeniedError(f"{server} sends us to {_netloc(url)} unencrypted; refused")
    return url


def proxy_for(scheme: str, host: str) -> str:
    """Return the proxy by HTTPS_PROXY, HTTP_PROXY and NO_PROXY; "" for a direct connection."""
    if is_loopback(f"[{host}]" if ":" in host else host):
        return ""
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return ""
    proxy = proxies.get(scheme, "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _error(error: BaseException, server: str, ca_advice: str = "") -> BootseerError:
    """Convert an error of urllib3 to a BootseerError, without the URL in its message."""
    if isinstance(error, exceptions.LocationValueError | UnicodeError):
        return InvalidInputError(f"{server} cannot be the name of a server")
    if isinstance(error, exceptions.TimeoutError | TimeoutError) and not isinstance(
        error, exceptions.NewConnectionError
    ):
        return DeadlineError(f"{server} does not answer in time")
    cause: BaseException | None = error
    reason, kind = "", UnavailableError
    while cause is not None and not reason:
        if isinstance(cause, BootseerError):
            return cause
        if isinstance(cause, ssl.SSLCertVerificationError):
            return PermissionDeniedError(
                f"the certificate of {server} is not trusted ({cause.verify_message})"
                + (f"; {ca_advice}" if ca_advice else "")
            )
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
            kind = RefusedError if isinstance(cause, ConnectionRefusedError) else kind
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, exceptions.ProtocolError) and not reason:
        reason = "it closed the connection"
    return kind(f"cannot talk to {server}: {reason or type(error).__name__}")


def retry_after_s(header: str | None, now: datetime) -> float:
    """Return the seconds in `Retry-After` (RFC 9110, 10.2.3), a number or a date; 0 if invalid."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    when = date_of(text)
    return 0.0 if when is None else max(0.0, (when - now).total_seconds())


def date_of(header: str) -> datetime | None:
    """Return the date in a header (RFC 9110, 5.6.7), or None."""
    try:
        when = email.utils.parsedate_to_datetime(header)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when
