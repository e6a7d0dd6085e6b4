"""HTTP to one server of a registry, and to wherever it sends us.

Uses urllib3: connection pools, certificates, proxies, and the deadline of every wait. Knows
nothing of logins, redirects and retries. Before anything is sent to another server than the
registry's, the address that answers is judged (`may_lead`). An answer's head must be there within
the deadline, also when it trickles; its body is watched by who reads it. Thread-safe; a `Response`
is for one thread.
"""

import email.utils
import io
import ipaddress
import logging
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import IntEnum
from typing import BinaryIO
from urllib.parse import urlsplit

import urllib3
from urllib3 import exceptions

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.registry.connections import CONNECT_S, Guarded, pool_classes
from bootseer.registry.hosts import Host
from bootseer.registry.reference import is_loopback

# It logs whole URLs, and the URL that a registry redirects to is a secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL + 1)

_CONNECTIONS_MAX = 32


class Reach(IntEnum):
    """Who can reach an address."""

    EVERYBODY = 0
    NETWORK = 1
    """Private, shared and reserved networks."""
    LINK = 2
    MACHINE = 3


_WHERE = {
    Reach.NETWORK: "a private network",
    Reach.LINK: "this node's own network (link-local)",
    Reach.MACHINE: "this machine",
}
_PIECE_BYTES = 2**20
_AT_ONCE_BYTES = 64 * 1024
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPv4_BITS = 0xFFFFFFFF


class Response:
    """An answer whose body is read piece by piece. Close it unless it was read to its end."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, server: str) -> None:
        self._raw = raw
        self.server = server
        """The server that answered, for messages."""
        self.status = raw.status
        self.headers: Mapping[str, str] = raw.headers

    def wait_at_most(self, seconds: float) -> None:
        """Have each wait for bytes of the body end after so long."""
        sock = getattr(self._raw.connection, "sock", None)
        if sock is not None:
            sock.settimeout(seconds)

    def read(self, size_bytes: int) -> bytes:
        """What has arrived, at most so much; b"" at the end.

        Raises: UnavailableError when the body is cut off, DeadlineError when nothing comes.
        """
        try:
            # None is an answer of its type, but not of its code.
            return self._raw.read1(size_bytes, decode_content=False) or b""
        except (exceptions.HTTPError, OSError, ValueError) as error:
            raise _error(error, self.server) from error

    def read_all(self, size_max_bytes: int, deadline_s: float) -> bytes:
        """The whole body. Raises: CorruptError where it is larger; as `read`."""
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
        """As its base."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """As its base. Raises: DeadlineError."""
        if time.monotonic() > self._ends_s:
            raise DeadlineError(f"{self._server} did not take the body within {self._seconds:g} s")
        return self._body.read(size)


class Transport:
    """Connections to one `Host`, and to others on its behalf."""

    def __init__(self, host: Host, deadline_s: float) -> None:
        self._host = host
        self._deadline_s = deadline_s
        parts = urlsplit(host.base_url)
        port = parts.port or urllib3.connection.port_by_scheme[parts.scheme]
        self._own = ((parts.hostname or "").lower(), port)
        # Until it has been seen, as behind a proxy: what may lead to the least.
        self._own_reach = _literal_reach(self._own[0]) or Reach.EVERYBODY
        self._managers: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | BinaryIO | None = None,
        *,
        more_s: float = 0.0,
    ) -> Response:
        """Send one request and return whatever is answered, redirects included. The answer's head
        may take the deadline and `more_s`.

        Raises: UnavailableError, DeadlineError; PermissionDeniedError for a certificate that is
        not trusted, and for a server that this registry may not send us to; InvalidInputError.
        """
        parts = urlsplit(url)
        reach = _literal_reach(parts.hostname or "")
        if reach is not None and (parts.hostname or "") != self._own[0]:
            self._check(reach, parts.hostname or "")
        server = parts.netloc.rpartition("@")[2]
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
                    connect=min(self._host.connect_s or CONNECT_S, self._deadline_s),
                    read=self._deadline_s + more_s,
                ),
            )
        except (exceptions.HTTPError, OSError, ValueError) as error:
            raise _error(error, server) from error
        return Response(raw, server)

    def _check(self, reach: Reach, server: str) -> None:
        """Raises: PermissionDeniedError."""
        if not may_lead(self._own_reach, reach):
            raise PermissionDeniedError(
                f"{self._host.name} sends us to {server}, which is in "
                f"{_WHERE[reach]}, and it is not there itself; refused"
            )

    def _guard(self, connection: Guarded, sock: socket.socket) -> None:
        address = str(sock.getpeername()[0])
        reach = reach_of(address)
        if (connection.host.strip("[]").lower(), connection.port) == self._own:
            self._own_reach = reach
            return
        try:
            self._check(reach, f"{connection.host} ({address})")
        except BaseException:
            sock.close()
            raise

    def _manager(self, scheme: str, host: str) -> urllib3.PoolManager:
        proxy = self._host.proxy or proxy_for(scheme, host)
        # Plain HTTP must not pay for reading the system's certificates, nor fail for want of ours.
        key = f"{scheme} {proxy}"
        with self._lock:
            manager = self._managers.get(key)
            if manager is None:
                context = self._context() if "https" in (scheme, urlsplit(proxy).scheme) else None
                manager = self._new_manager(proxy, context)
                self._managers[key] = manager
            return manager

    def _new_manager(self, proxy: str, context: ssl.SSLContext | None) -> urllib3.PoolManager:
        manager: urllib3.PoolManager
        if proxy:
            user = urlsplit(proxy)
            login = f"{user.username}:{user.password or ''}" if user.username else None
            manager = urllib3.ProxyManager(
                f"{user.scheme}://{user.netloc.rpartition('@')[2]}",
                proxy_headers=urllib3.make_headers(proxy_basic_auth=login) if login else None,
                ssl_context=context,
                maxsize=_CONNECTIONS_MAX,
            )
            # What a name means behind a proxy is for that to judge.
            manager.pool_classes_by_scheme = pool_classes(lambda connection, sock: None)
        else:
            manager = urllib3.PoolManager(ssl_context=context, maxsize=_CONNECTIONS_MAX)
            manager.pool_classes_by_scheme = pool_classes(self._guard)
        return manager

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        path = None
        try:
            for path in self._host.ca_files:
                context.load_verify_locations(cafile=path)
            for path, key in self._host.client_certificates:
                context.load_cert_chain(path, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"cannot use the certificate {path} for {self._host.name}: {error}"
            ) from error
        if not self._host.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        with self._lock:
            managers, self._managers = self._managers, {}
        for manager in managers.values():
            manager.clear()


def _literal_reach(host: str) -> Reach | None:
    """The reach of a host that is written as an address; None for a name."""
    try:
        return reach_of(host)
    except ValueError:
        return None


def _no_password() -> str:
    raise ValueError("its key is protected by a password")


def proxy_for(scheme: str, host: str) -> str:
    """What HTTPS_PROXY, HTTP_PROXY and NO_PROXY say; "" for a direct connection."""
    if is_loopback(f"[{host}]" if ":" in host else host):
        return ""
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return ""
    proxy = proxies.get(scheme, "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _error(error: BaseException, server: str) -> BootseerError:
    """urllib3's error as one of ours, without the URL that its message holds."""
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
                f"the certificate of {server} is not trusted ({cause.verify_message}); give its "
                "authority as `ca` in the registry's hosts.toml"
            )
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, exceptions.ProtocolError) and not reason:
        reason = "it closed the connection"
    return UnavailableError(f"cannot talk to {server}: {reason or type(error).__name__}")


def reach_of(address: str) -> Reach:
    """Who can reach an address, which is written as `getpeername` tells it. Raises: ValueError
    where it is none."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & _IPv4_BITS)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip.is_loopback or ip.is_unspecified:
        return Reach.MACHINE
    if ip.is_link_local or ip.is_multicast:
        return Reach.LINK
    return Reach.EVERYBODY if ip.is_global else Reach.NETWORK


def may_lead(registry: Reach, target: Reach) -> bool:
    """Whether a registry may send us to `target`: to the internet always; into private networks
    where it is not on the internet itself; to a link or this machine only where it is there.

    Registries redirect downloads to object stores, and logins to token servers. A registry on the
    internet has no business with what only this node or its network can reach: the cloud's metadata
    (169.254.169.254), services on this machine, the intranet. Pure.
    """
    if target is Reach.NETWORK:
        return registry is not Reach.EVERYBODY
    return target in (Reach.EVERYBODY, registry)


def retry_after_s(header: str | None, now: datetime) -> float:
    """Seconds that `Retry-After` asks for (RFC 9110, 10.2.3): a number or a date; 0 where it says
    nothing that can be understood."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())
