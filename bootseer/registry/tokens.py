"""Login to one server: Basic, and the Bearer tokens of Docker's and OCI's token servers.

Threads share one token for each action; it is renewed shortly before it expires, or when the server
refuses it. Logins are looked up anew for every token, since those of cloud registries change.
Thread-safe.

The protocol: distribution.github.io/distribution/spec/auth/{token,oauth}.
"""

import base64
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from msgspec import Meta, Struct

from bootseer.base.documents import DocumentFormat
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.http.addresses import is_loopback
from bootseer.http.transport import Response, Transport
from bootseer.registry.credentials import Credential
from bootseer.registry.hosts import RegistryHost
from bootseer.transfer.policy import fresh_copy

_ANSWER_BYTES_MAX = 2**20
_Token = Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{0,65536}\Z")]
_LIFE_DEFAULT_S = 60.0
"""Life of a token without `expires_in`, by the specification."""
_LIFE_MAX_S = 1e9
_LIFE_SHARE = 0.9
"""Share of its life after which a token is renewed, so that it does not expire in transit."""
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]*))')
_SCHEME = re.compile(rf"({_TOKEN})(?:\s+|\s*$|(?=\s*,))")
_HEADER_CHARACTERS_MAX = 16_384


class _TokenAnswer(Struct, frozen=True):
    token: _Token = ""
    access_token: _Token = ""
    expires_in: Any = None


_ANSWER: DocumentFormat[_TokenAnswer] = DocumentFormat(
    type=_TokenAnswer, size_max=_ANSWER_BYTES_MAX, is_foreign=True
)


class Challenge(Struct, frozen=True):
    """Challenge of a `WWW-Authenticate` header (RFC 9110, 11.6.1)."""

    scheme: str
    """`bearer` or `basic`."""
    parameters: Mapping[str, str]
    """Parameters by lower-case name."""


class _Grant(Struct, frozen=True):
    header: str
    valid_until: float
    challenge: Challenge


class Authorizer:
    """Authorization for one repository on one server."""

    def __init__(
        self,
        host: RegistryHost,
        repository: str,
        transport: Transport,
        find_login: Callable[[str, str], Credential | None],
        deadline_s: float,
    ) -> None:
        self._host = host
        self._repository = repository
        self._transport = transport
        self._find_login = find_login
        self._deadline_s = deadline_s
        self._grants: dict[str, _Grant] = {}
        self._lock = threading.Lock()
        self._failed_s = float("-inf")
        self._failure: BootseerError | None = None
        """The last error of a token server, which came at `_failed_s`."""

    @contextlib.contextmanager
    def _fetch_lock(self) -> Iterator[None]:
        """Hold the lock under which a token is fetched.

        Raises the error of another thread that failed while this one waited. Otherwise the threads
        would wait for a server that hangs one after the other.
        """
        began_s = time.monotonic()
        with self._lock:
            if self._failure is not None and self._failed_s >= began_s:
                raise fresh_copy(self._failure)
            try:
                yield
            except (UnavailableError, DeadlineError) as error:
                self._failure, self._failed_s = error, time.monotonic()
                raise

    def header(self, action: str) -> str | None:
        """Return the Authorization for "pull" or "push"; None before the server asked for one.

        Raises: as `renewed`, if a token has to be renewed.
        """
        with self._fetch_lock():
            grant = self._grants.get(action)
            if grant and time.monotonic() > grant.valid_until:
                grant = self._grants[action] = self._grant(grant.challenge, action)
            return grant.header if grant else None

    def renewed(self, asked: str, action: str, refused: str | None) -> str:
        """Return another Authorization, after the server refused `refused` (or its absence).

        `asked` is the value of WWW-Authenticate in its answer.

        Raises: PermissionDeniedError if there is none; UnavailableError, DeadlineError.
        """
        with self._fetch_lock():
            grant = self._grants.get(action)
            if grant and grant.header != refused:
                return grant.header  # Another thread was faster.
            challenges = {c.scheme: c for c in reversed(parse_challenges(asked))}
            challenge = challenges.get("bearer") or challenges.get("basic")
            if challenge is None:
                raise PermissionDeniedError(
                    f"{self._host.name} refused access and asks for a login of an unknown kind"
                )
            grant = self._grant(challenge, action)
            if grant.header == refused:
                self._grants.pop(action, None)
                raise self._denied()
            self._grants[action] = grant
            return grant.header

    def _grant(self, challenge: Challenge, action: str) -> _Grant:
        login = self._find_login(self._host.name, self._repository)
        if challenge.scheme == "basic":
            if login is None or login.identity_token:
                raise self._denied()
            return _Grant(f"Basic {_basic(login)}", float("inf"), challenge)
        asked_at = time.monotonic()
        token, life_s = self._token(challenge, action, login)
        return _Grant(f"Bearer {token}", asked_at + _LIFE_SHARE * life_s, challenge)

    def _token(
        self, challenge: Challenge, action: str, login: Credential | None
    ) -> tuple[str, float]:
        realm = self._checked_realm(challenge.parameters.get("realm", ""))
        fields = {
            name: challenge.parameters[name]
            for name in ("service", "scope")
            if challenge.parameters.get(name)
        }
        if "scope" not in fields:
            actions = "pull,push" if action == "push" else "pull"
            fields["scope"] = f"repository:{self._repository}:{actions}"
        if login and login.identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": "bootseer",
                "refresh_token": login.identity_token,
                **fields,
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._transport.request("POST", realm, headers, urlencode(form).encode())
        else:
            # Several scopes are several parameters (RFC 6749 separates them by spaces).
            query = [("scope", scope) for scope in fields.pop("scope").split()]
            headers = {}
            if login:
                query.append(("account", login.username))
                headers["Authorization"] = f"Basic {_basic(login)}"
            mark = "&" if urlsplit(realm).query else "?"
            url = realm + mark + urlencode([*fields.items(), *query])
            response = self._transport.request("GET", url, headers)
        return self._parsed(response)

    def _checked_realm(self, realm: str) -> str:
        try:
            parts = urlsplit(realm)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UnavailableError(f"{self._host.name} names no server to get a token from")
        secure = self._host.base_url.startswith("https:")
        if parts.scheme == "http" and secure and not is_loopback(parts.netloc):
            raise PermissionDeniedError(
                f"{self._host.name} wants the login sent to {parts.netloc} unencrypted; refused"
            )
        return realm

    def _parsed(self, response: Response) -> tuple[str, float]:
        try:
            if response.status in (400, 401, 403):
                raise self._denied()
            if response.status != 200:
                raise UnavailableError(
                    f"the token server {response.server} answered {response.status}"
                )
            data = response.read_all(_ANSWER_BYTES_MAX, self._deadline_s)
        finally:
            response.close()
        with contextlib.suppress(CorruptError):
            answer = _ANSWER.decode(data, "its answer")
            if token := answer.token or answer.access_token:
                life_s = answer.expires_in
                known = isinstance(life_s, int | float) and life_s > 0
                return token, float(min(life_s, _LIFE_MAX_S)) if known else _LIFE_DEFAULT_S
        raise UnavailableError(f"the token server {response.server} gave no token")

    def _denied(self) -> BootseerError:
        name = self._host.name
        return PermissionDeniedError(
            f"{name} refuses access to {self._repository}: it does not exist there, or needs "
            f"another login (docker login {name})"
        )


def _basic(login: Credential) -> str:
    return base64.b64encode(f"{login.username}:{login.password}".encode()).decode()


def parse_challenges(header: str) -> Sequence[Challenge]:
    """Return the challenges in a header's value, up to the first that cannot be parsed."""
    text = header[:_HEADER_CHARACTERS_MAX]
    challenges: list[Challenge] = []
    parameters: dict[str, str] = {}
    position = 0
    while position < len(text):
        if text[position] in " \t,":
            position += 1
            continue
        parameter = _PARAMETER.match(text, position)
        if parameter and challenges:
            name, quoted, plain = parameter.groups()
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            parameters[name.lower()] = value
            position = parameter.end()
            continue
        scheme = _SCHEME.match(text, position)
        if scheme is None:
            break
        parameters = {}
        challenges.append(Challenge(scheme[1].lower(), parameters))
        position = scheme.end()
    return challenges
