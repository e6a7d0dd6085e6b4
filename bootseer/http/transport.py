"""Requests to one HTTP server, and to wherever it sends us.

Uses urllib3 for connections, certificates and proxies. Four rules are kept here, for every caller:

- Each wait has an end. The head of an answer must be there within the deadline, also when it
  trickles: a socket's own time-out starts again with every byte, so one watchdog thread ends what
  lasts too long. Bodies are watched by who reads them.
- The address that answers is judged before anything is sent to it, unless it is the server's own
  (`addresses.may_lead`). What a name resolved to before does not count.
- Nothing goes from TLS to plain HTTP, but on this machine.
- `Server.headers` and logins reach the server itself, and nobody whom it names.

There are no attempts here: each request is made once. Thread-safe; a `Response` is for one thread.
No message has more of a URL than its host: the rest may be a secret.
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
from bootseer.base.wait_budget import WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.http.addresses import Reach, is_loopback, literal_reach, may_lead, reach_of
from bootseer.transfer.pace import STALL_S

# It logs whole URLs, and the URL that a server redirects to is a secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL + 1)

CONNECT_S = 10.0
"""A TCP handshake takes three packets; two of them may be lost (1 s and 2 s) and more."""
_CONNECTS_MAX = 4
"""How many times as long as a handshake of TCP all of them may take: with several addresses of a
name, a proxy and TLS."""
_CONNECTIONS_MAX = 32
_PIECE_BYTES = 2**20
_AT_ONCE_BYTES = 64 * 1024
_REDIRECTS_MAX = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

_Result = TypeVar("_Result")


class Server(Struct, frozen=True):
    """Address of an HTTP server, and the settings for connections to it."""

    name: str
    """For messages, mostly host[:port]."""
    base_url: str
    """Scheme, host and port; more of it is its user's affair."""
    verify: bool = True
    """Whether its certificate is verified."""
    ca_files: tuple[Path, ...] = ()
    """Authorities that are trusted besides the system's."""
    trusts_ca_files_alone: bool = False
    """Whether only `ca_files` are trusted, and old authorities among them: many lack an extension
    that Python insists on since 3.13."""
    client_certificates: tuple[tuple[Path, Path | None], ...] = ()
    """(certificate, key); the key is in the certificate's file when None."""
    headers: tuple[tuple[str, str], ...] = ()
    """Sent to this server with each request, and to no other one."""
    connect_s: float | None = None
    """What a connection may take until it is there; None: `CONNECT_S`."""
    proxy: str | None = None
    """"" for a direct connection; None: as the environment says."""
    ca_advice: str = ""
    """What to do about a certificate that is not trusted, for messages."""


# ---- connections --------------------------------------------------------------------------------


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
                _start_thread(self._watch, "watchdog")
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
    """Return what `function`, which uses a socket, returns; after `seconds` the socket is shut."""
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


def _start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread. Raises: UnavailableError when none can be started."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot start a thread ({error}): raise the limit of processes (ulimit -u, or "
            "pids.max of the cgroup) or free memory"
        ) from error


def _connected(connect: Callable[[], socket.socket], seconds: float) -> socket.socket:
    """Return the socket that `connect` opens, in a thread of its own: nothing else leaves a name
    that is being looked up. Raises: urllib3's ConnectTimeoutError; as `connect`."""
    ends: queue.SimpleQueue[socket.socket | BaseException] = queue.SimpleQueue()
    is_left = threading.Lock()

    def run() -> None:
        try:
            end: socket.socket | BaseException = connect()
        except BaseException as error:
            end = error
        ends.put(end)
        if not is_left.acquire(blocking=False) and isinstance(end, socket.socket):
            end.close()

    _start_thread(run, "bootseer-connect")
    try:
        end = ends.get(timeout=seconds)
    except queue.Empty:
        # Whoever comes second sees that the other one has been here.
        if is_left.acquire(blocking=False):
            raise exceptions.ConnectTimeoutError(None, f"after {seconds:g} s") from None
        end = ends.get()
    if isinstance(end, BaseException):
        raise end
    return end


_Guard = Callable[[str, int, socket.socket], None]
"""Looks at a new connection to (host, port). Raises: PermissionDeniedError."""


class _Guarded:
    """Both kinds of connections: their guard looks at each, and heads come in time."""

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
            with contextlib.suppress(OSError):  # closed already, where no body follows
                # From here on only the body is waited for.
                sock.settimeout(min(STALL_S, seconds))
        return response


class _Connection(_Guarded, urllib3.connection.HTTPConnection):  # type: ignore[misc]
    pass


class _SecureConnection(_Guarded, urllib3.connection.HTTPSConnection):  # type: ignore[misc]
    def connect(self) -> None:
        # A proxy's answer has lines without end, and each of them a time-out of its own.
        _in_time(lambda: self.sock, super().connect, _CONNECTS_MAX * (self.timeout or CONNECT_S))
        # Who does not verify has said so; urllib3 would warn at each request.
        self.is_verified = True


def _pool_classes(guard: _Guard) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Return pools whose new connections `guard` looks at."""
    own = {"guard": staticmethod(guard)}

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = type("Plain", (_Connection,), own)

    class SecurePool(urllib3.HTTPSConnectionPool):
        ConnectionCls = type("Secure", (_SecureConnection,), own)

    return {"http": Pool, "https": SecurePool}


# ---- requests -----------------------------------------------------------------------------------


class Response(Closing):
    """An answer whose body is read piece by piece. Close it unless it was read to its end."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, url: str, wait_budget: WaitBudget) -> None:
        self._raw = raw
        self._wait_budget = wait_budget
        self.url = url
        """What was asked for; a secret, where another server sent us there."""
        self.server = _netloc(url)
        """The server that answered, for messages."""
        self.status = raw.status
        self.headers: Mapping[str, str] = raw.headers

    def wait_at_most(self, seconds: float) -> None:
        """Limit each wait for bytes of the body to so long."""
        sock = getattr(self._raw.connection, "sock", None)
        if sock is not None:
            sock.settimeout(seconds)

    def read(self, size_bytes: int) -> bytes:
        """Return the bytes that have arrived, at most `size_bytes`; b"" at the end.

        Raises: UnavailableError when the body is cut off, DeadlineError when nothing comes.
        """
        began_s = time.monotonic()
        try:
            # None is an answer of its type, but not of its code.
            return self._raw.read1(size_bytes, decode_content=False) or b""
        except (exceptions.HTTPError, OSError, ValueError) as error:
            self._wait_budget.spend(time.monotonic() - began_s)
            raise _error(error, self.server) from error

    def read_all(self, size_max_bytes: int, deadline_s: float) -> bytes:
        """Return the whole body. Raises: CorruptError where it is larger; as `read`."""
        ends = time.monotonic() + deadline_s
        pieces: list[bytes] = []
        size_bytes = 0
        while data := self.read(_PIECE_BYTES):
            pieces.append(data)
            size_bytes += len(data)
            if size_bytes > size_max_bytes:
                self.close()
                raise CorruptError(f"{self.server} sent more than {size_max_bytes} bytes")
            if time.monotonic() > ends:
                self.close()
                raise DeadlineError(f"{self.server} did not finish within {deadline_s:g} s")
        return b"".join(pieces)

    def unavailable(self, message: str) -> UnavailableError:
        """Return the error of a server that could not answer now, with its `Retry-After`."""
        error = UnavailableError(message)
        error.retry_after_s = retry_after_s(self.headers.get("Retry-After"), datetime.now(UTC))
        return error

    def close(self) -> None:
        """Give the connection up. Idempotent, never raises."""
        self._raw.close()


class _Upload(io.RawIOBase):
    """A body that is sent within a deadline: a server that takes a byte now and then would hold its
    sender for ever."""

    def __init__(self, body: BinaryIO, server: str, seconds: float) -> None:
        super().__init__()
        self._body = body
        self._server = server
        self._seconds = seconds
        self._ends_s = time.monotonic() + seconds

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return bytes of the body. Raises: DeadlineError."""
        if time.monotonic() > self._ends_s:
            raise DeadlineError(f"{self._server} did not take the body within {self._seconds:g} s")
        return self._body.read(size)


class Transport(Closing):
    """Connections to one `Server`, and to others on its behalf."""

    def __init__(
        self, server: Server, deadline_s: float, wait_budget: WaitBudget | None = None
    ) -> None:
        """Make a transport; no server is asked.

        Args:
            server: The server, and how it is reached.
            deadline_s: Seconds within which the head of an answer comes, and a body is taken.
            patience: Seconds that all requests which bring nothing may take together.
        """
        self._server = server
        self._deadline_s = deadline_s
        self._wait_budget = wait_budget or WaitBudget()
        parts = urlsplit(server.base_url)
        self._origin = (parts.scheme, parts.netloc)
        port = parts.port or urllib3.connection.port_by_scheme[parts.scheme]
        self._own = ((parts.hostname or "").lower(), port)
        # Until it has been seen, as behind a proxy: what may lead to the least.
        self._own_reach = literal_reach(self._own[0]) or Reach.EVERYBODY
        self._managers: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def is_own(self, url: str) -> bool:
        """Tell whether `url` is one of the server itself."""
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

        The headers of the server are not added. The answer's head may take the deadline and
        `more_s`.

        Raises: UnavailableError, DeadlineError; PermissionDeniedError for a certificate that is
        not trusted, and for a server that this one may not send us to; InvalidInputError.
        """
        parts = urlsplit(url)
        reach = literal_reach(parts.hostname or "")
        if reach is not None and (parts.hostname or "") != self._own[0]:
            self._check(reach, parts.hostname or "")
        server = _netloc(url)
        given = {"Accept-Encoding": "identity", "User-Agent": "bootseer", **headers}
        sent: bytes | _Upload | None
        if body is None or (isinstance(body, bytes) and len(body) <= _AT_ONCE_BYTES):
            sent = body
        else:
            if isinstance(body, bytes):
                # In pieces: a socket's time-out counts for all that it is given at once.
                given.setdefault("Content-Length", str(len(body)))
                body = io.BytesIO(body)
            sent = _Upload(body, server, self._deadline_s + more_s)
        manager = self._manager(parts.scheme, parts.hostname or "")
        left_s = self._wait_budget.left_s
        if left_s <= 0:
            raise DeadlineError(
                f"{server} was not asked: no answer within {self._wait_budget.limit_s:g} s, in "
                "earlier calls"
            )
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

        `own_headers` and the server's are sent to the server itself alone.

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
                raise UnavailableError(f"{response.server} redirects to where we cannot go")
        raise UnavailableError(f"{self._server.name} redirects without end")

    def _check(self, reach: Reach, server: str) -> None:
        """Raises: PermissionDeniedError."""
        if not may_lead(self._own_reach, reach):
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
        # Plain HTTP must not pay for reading the system's certificates, nor fail for want of ours.
        # A forked child shares no connection with its parent.
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
        # What a name means behind a proxy is for that to judge.
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
    """Return the URL, in full, that the `server` at `base_url` gave.

    Raises: UnavailableError where it is none; PermissionDeniedError where it leaves what is
    encrypted.
    """
    try:
        url = urljoin(base_url, path)
        parts = urlsplit(url)
    except ValueError as error:
        raise UnavailableError(f"{server} sends us to what is no URL") from error
    if base_url.startswith("https:") and parts.scheme == "http" and not is_loopback(parts.netloc):
        raise PermissionDeniedError(f"{server} sends us to {_netloc(url)} unencrypted; refused")
    return url


def proxy_for(scheme: str, host: str) -> str:
    """Return what HTTPS_PROXY, HTTP_PROXY and NO_PROXY say; "" for a direct connection."""
    if is_loopback(f"[{host}]" if ":" in host else host):
        return ""
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return ""
    proxy = proxies.get(scheme, "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _error(error: BaseException, server: str, ca_advice: str = "") -> BootseerError:
    """Return the Bootseer error for an error of urllib3, without the URL in its message."""
    if isinstance(error, exceptions.LocationValueError | UnicodeError):
        return InvalidInputError(f"{server} cannot be the name of a server")
    if isinstance(error, exceptions.TimeoutError | TimeoutError) and not isinstance(
        error, exceptions.NewConnectionError
    ):
        return DeadlineError(f"{server} does not answer in time")
    cause: BaseException | None = error
    reason = ""
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
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, exceptions.ProtocolError) and not reason:
        reason = "it closed the connection"
    return UnavailableError(f"cannot talk to {server}: {reason or type(error).__name__}")


def retry_after_s(header: str | None, now: datetime) -> float:
    """Return the seconds that `Retry-After` asks for (RFC 9110, 10.2.3): a number or a date; 0
    where it says nothing that can be understood."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    when = date_of(text)
    return 0.0 if when is None else max(0.0, (when - now).total_seconds())


def date_of(header: str) -> datetime | None:
    """Return the date that a header says (RFC 9110, 5.6.7); None where it says none."""
    try:
        when = email.utils.parsedate_to_datetime(header)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when
