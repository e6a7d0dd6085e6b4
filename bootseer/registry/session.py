"""Requests to one repository on one server, with logins, and errors for unsuccessful answers.

Each request is sent once, and once more if the server asks for another login. Thread-safe.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Annotated, BinaryIO
from urllib.parse import urlencode, urlsplit

from msgspec import Meta, Struct

from bootseer.base.documents import DocumentFormat
from bootseer.base.wait_budget import WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.http.transport import Response, Transport, joined
from bootseer.registry.credentials import Credential
from bootseer.registry.hosts import RegistryHost
from bootseer.registry.tokens import Authorizer
from bootseer.transfer.policy import is_transient

_ERROR_BYTES_MAX = 64 * 1024
_ERROR_DEADLINE_S = 5.0
_SUSPECT_S = 30.0
_MOVED_S = 60.0
"""Time for which the signed URL of a blob is used again; such URLs are valid for ten minutes and
more. Asking the registry for each part of a blob would double the latency of a fault, and many
registries limit the number of requests."""
_MOVED_COUNT_MAX = 1000

# Answers of Go's servers and of nginx to plain HTTP on a port for TLS.
_WANTS_TLS = (b"HTTP request to an HTTPS server", b"plain HTTP request was sent to HTTPS port")

Body = bytes | Callable[[], BinaryIO]
"""Body of a request: bytes, or a function that opens them, since they may be sent twice."""


class RegistrySession:
    """Connection to one repository on one server."""

    def __init__(
        self,
        host: RegistryHost,
        repository: str,
        find_login: Callable[[str, str], Credential | None],
        deadline_s: float,
        wait_budget: WaitBudget,
    ) -> None:
        self.host = host
        self.name = f"{host.name}/{repository}"
        """Name of the repository in messages."""
        self._base_url = f"{host.base_url}/{repository}/"
        self._transport = Transport(host, deadline_s, wait_budget)
        self._authorizer = Authorizer(host, repository, self._transport, find_login, deadline_s)
        self._failed_at = float("-inf")
        self._moved: dict[str, tuple[str, float]] = {}
        """URL of a blob here -> its signed URL on another server, and the end of its use."""

    @property
    def is_suspect(self) -> bool:
        """Whether the server failed lately, so that other servers should be asked first."""
        return time.monotonic() - self._failed_at < _SUSPECT_S

    def note_failure(self) -> None:
        """Note that the server failed, so that it is asked last for a while."""
        self._failed_at = time.monotonic()

    def open(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        content_length: int | None = None,
        more_s: float = 0.0,
    ) -> Response:
        """Send a request and return the successful answer (2xx). Close it.

        `path` is relative to the repository's URL, or a URL that the registry gave. The answer's
        head may come `more_s` after the deadline.

        Raises: NotFoundError, PermissionDeniedError, InvalidInputError, UnavailableError,
        DeadlineError, CorruptError.
        """
        url = self._url(path, query or {})
        action = "pull" if method in ("GET", "HEAD") else "push"
        sent = dict(headers or {})
        if content_length is not None:
            sent["Content-Length"] = str(content_length)
        if method == "GET" and (found := self._open_moved(url, sent)):
            return found
        authorization = self._authorizer.header(action)
        for is_last in (False, True):
            own = {"Authorization": authorization} if authorization else {}
            with contextlib.ExitStack() as stack:
                data = stack.enter_context(body()) if callable(body) else body
                response = self._transport.follow(
                    method, url, sent, data, own_headers=own, more_s=more_s
                )
            if not self._transport.is_own(response.url):
                self._note_moved(method, url, response)
            if response.status != 401 or is_last:
                break
            asked = response.headers.get("WWW-Authenticate", "")
            response.close()
            authorization = self._authorizer.renewed(asked, action, authorization)
        if 200 <= response.status < 300:
            return response
        raise self._error(response, f"{method} {path.partition('?')[0][:100]}")

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        url = joined(self._base_url, path, self.name)
        if self.host.namespace:
            query = {**query, "ns": self.host.namespace}
        if query:
            url += ("&" if urlsplit(url).query else "?") + urlencode(query)
        return url

    def _open_moved(self, url: str, headers: Mapping[str, str]) -> Response | None:
        """Request a blob from the signed URL that was used lately; return None without one."""
        target, until = self._moved.get(url, ("", 0.0))
        if time.monotonic() > until:
            return None
        try:
            response = self._transport.request("GET", target, headers)
        except BootseerError:
            self._moved.pop(url, None)
            raise
        if response.status in (200, 206):
            return response
        response.close()
        self._moved.pop(url, None)
        return None

    def _note_moved(self, method: str, url: str, response: Response) -> None:
        """Remember the signed URL of a blob. Raises: UnavailableError if the URL was refused."""
        # A signed URL that has expired is refused; the next attempt asks for a new one.
        if response.status in (400, 401, 403):
            response.close()
            raise UnavailableError(
                f"{response.server}, where {self.name} sent us, answered {response.status}"
            )
        if method == "GET" and "/blobs/" in url:
            if len(self._moved) >= _MOVED_COUNT_MAX:
                self._moved.clear()
            self._moved[url] = (response.url, time.monotonic() + _MOVED_S)

    def _error(self, response: Response, what: str) -> BootseerError:
        """Return the error for an unsuccessful answer, and close the answer."""
        status = response.status
        data = b""
        with contextlib.suppress(BootseerError):
            data = response.read_all(_ERROR_BYTES_MAX, _ERROR_DEADLINE_S)
        response.close()
        said = _message(data)
        message = f"{self.name}: {what} was answered {status}{said}"
        if status == 404:
            is_image = " manifests/" in what
            return NotFoundError(message + "; check the image's name and tag" * is_image)
        if status in (401, 403):
            return PermissionDeniedError(
                f"{message}; it may need another login (docker login {self.host.name})"
            )
        if is_transient(status):
            return response.unavailable(message)
        if status == 416:
            return CorruptError(f"{self.name}: {what}: it is shorter than declared")
        if status == 405:
            return UnsupportedError(f"{message}; the registry does not allow it")
        if status == 400 and any(text in data for text in _WANTS_TLS):
            return InvalidInputError(
                f"{self.name}: {response.server} wants TLS; on this machine a registry is asked "
                f'without it: write server = "https://{response.server}", and `ca` where its '
                f"certificate is your own, to {response.server}/hosts.toml in registry_hosts_dir"
            )
        if 400 <= status < 500:
            return InvalidInputError(message)
        return UnavailableError(message)

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        self._transport.close()


class _Error(Struct, frozen=True):
    code: str


class _Errors(Struct, frozen=True):
    errors: Annotated[tuple[_Error, ...], Meta(min_length=1)]


_ERRORS: DocumentFormat[_Errors] = DocumentFormat(
    type=_Errors, size_max=_ERROR_BYTES_MAX, is_foreign=True
)


def _message(data: bytes) -> str:
    """Return the code in an error's body (distribution specification, "Error Codes").

    The free text is left out, since it may quote secrets of the request.
    """
    try:
        code = _ERRORS.decode(data, "an answer").errors[0].code
    except CorruptError:
        return ""
    return f" ({code[:60]})" if code.isidentifier() else ""
