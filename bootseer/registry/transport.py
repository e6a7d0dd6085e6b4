"""HTTP to one server of a registry, and to wherever it sends us.

Alone uses urllib3: connection pools, certificates, proxies, and the deadline of every wait. Knows
nothing of logins, redirects and retries. An answer's head must be there within the deadline, also
when it trickles; its body is watched by who reads it. Thread-safe; a `Response` is for one thread.
"""

import contextlib
import logging
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import BinaryIO, TypeVar
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
from bootseer.registry.hosts import Host
from bootseer.registry.reference import is_loopback
from bootseer.registry.retry import STALL_S

# It logs whole URLs, and the URL that a registry redirects to is a secret.
logging.getLogger("urllib3").setLevel(logging.CRITICAL + 1)

CONNECT_S = 10.0
"""A TCP handshake takes three packets; two of them may be lost (1 s and 2 s) and more."""
_CONNECTIONS_MAX = 32
_PIECE_BYTES = 2**20

_Result = TypeVar("_Result")


class Response:
    """An answer whose body is read piece by piece. Close it unless it was read to its end."""

    def __init__(self, raw: urllib3.BaseHTTPResponse, server: str) -> None:
        self._raw = raw
        self.server = server
        """Who answered, for messages."""
        self.status = raw.status
        self.headers: Mapping[str, str] = raw.headers

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


class _Connection(urllib3.connection.HTTPConnection):
    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as its base
        return _in_time(self.sock, super().getresponse, self.timeout or CONNECT_S)


class _SecureConnection(urllib3.connection.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        # Whoever wrote `skip_verify` knows; urllib3 would warn at each request.
        self.is_verified = True

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as its base
        return _in_time(self.sock, super().getresponse, self.timeout or CONNECT_S)


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class Transport:
    """Connections to one `Host`, and to others on its behalf."""

    def __init__(self, host: Host, deadline_s: float) -> None:
        self._host = host
        self._deadline_s = deadline_s
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
        not trusted; InvalidInputError.
        """
        parts = urlsplit(url)
        server = parts.netloc.rpartition("@")[2]
        manager = self._manager(parts.scheme, parts.hostname or "")
        try:
            raw = manager.urlopen(
                method,
                url,
                body=body,
                headers={"Accept-Encoding": "identity", "User-Agent": "bootseer", **headers},
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

    def _manager(self, scheme: str, host: str) -> urllib3.PoolManager:
        proxy = self._host.proxy or _proxy(scheme, host)
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
        else:
            manager = urllib3.PoolManager(ssl_context=context, maxsize=_CONNECTIONS_MAX)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
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


def _no_password() -> str:
    raise ValueError("its key is protected by a password")


def _proxy(scheme: str, host: str) -> str:
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
