"""Credentials for a registry, as `docker login`, `podman login` and credential helpers keep them.

Secrets never reach a message, log or argument list: helpers (`docker-credential-NAME get`) are
called through a pipe, the representation of a `Credential` hides its secrets, and logins that were
found are hidden in all later messages of the process (`base.redact`). If a file or helper fails, a
warning is logged and the operation goes on, because a registry may answer without credentials.
Thread-safe.
"""

import base64
import binascii
import contextlib
import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, parse
from bootseer.base.redact import hide_login
from bootseer.errors import CorruptError
from bootseer.registry.reference import DOCKER_HUB

_log = logging.getLogger(__name__)

HELPER_DEADLINE_S = 20.0
"""A cloud's helper asks its metadata server, which takes a second or two."""
_REAP_S = 5.0
"""Time for a killed helper to end; more if it waits for a file system that hangs."""
_FILE_BYTES_MAX = 2**20
_OUTPUT_BYTES_MAX = 2**24
_HUB_SERVER = "https://index.docker.io/v1/"
"""Docker's name of the Hub in its files and for its helpers."""
_HELPER = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKEN_USER = "<token>"


class Credential(Struct, frozen=True):
    """A user name with a password, or an identity token instead of the password."""

    username: str
    password: str = ""
    identity_token: str = ""
    """An OAuth2 refresh token; "" if there is a password."""

    def __repr__(self) -> str:
        return f"Credential(username={self.username!r})"


class _HelperAnswer(Struct, frozen=True, rename="pascal"):
    username: str
    secret: str

    def __repr__(self) -> str:
        return "a helper's answer"


_ANSWER: DocumentFormat[_HelperAnswer] = DocumentFormat(
    type=_HelperAnswer, size_max=_FILE_BYTES_MAX, is_foreign=True
)


def find_credential(
    host: str, repository: str, environ: Mapping[str, str] = os.environ
) -> Credential | None:
    """Return the login for `repository` on `host`, or None if none is configured.

    May run a helper for `HELPER_DEADLINE_S`.
    """
    for path in _files(environ):
        config = _read(path)
        credential = _from_helper(config, host, path) or _from_auths(config, host, repository, path)
        if credential:
            hide_login(credential.password, credential.identity_token)
            return credential
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that may hold logins, in order of precedence."""
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    if environ.get("DOCKER_CONFIG"):
        yield Path(environ["DOCKER_CONFIG"]) / "config.json"
    elif environ.get("HOME"):
        yield Path(environ["HOME"]) / ".docker" / "config.json"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
        document = parse(data, "a file of logins", _FILE_BYTES_MAX, is_foreign=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _log.warning("cannot read the registry logins in %s: %s", path, error.strerror)
        return {}
    except CorruptError:
        document = None
    if not isinstance(document, dict):
        # The reason would quote the file, and so perhaps a password.
        _log.warning("%s is not valid JSON; its registry logins are not used", path)
        return {}
    return document


def _ask_helper(program: str, server: str) -> tuple[int, bytes]:
    """Return the exit code and output of a credential helper.

    `subprocess.run` would kill the helper after its timeout, but then wait without limit for a
    child that has the pipe open; so the output is a memory file. Raises: OSError;
    subprocess.TimeoutExpired, after the helper and its process group were killed.
    """
    source, sink = os.memfd_create("input"), os.memfd_create("output")
    try:
        os.pwrite(source, server.encode(), 0)
        process = subprocess.Popen(
            [program, "get"],
            stdin=source,
            stdout=sink,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(HELPER_DEADLINE_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
            raise
        return code, os.pread(sink, _OUTPUT_BYTES_MAX, 0)
    finally:
        os.close(source)
        os.close(sink)


def _from_helper(config: Mapping[str, Any], host: str, path: Path) -> Credential | None:
    helpers = config.get("credHelpers")
    server = _HUB_SERVER if host == DOCKER_HUB else host
    names = [helpers.get(key) for key in (host, server)] if isinstance(helpers, dict) else []
    name = next((n for n in (*names, config.get("credsStore")) if n), None)
    if name is None:
        return None
    if not isinstance(name, str) or not _HELPER.fullmatch(name):
        _log.warning("%s names a credential helper that cannot be one; it is not run", path)
        return None
    program = f"docker-credential-{name}"
    try:
        code, said = _ask_helper(program, server)
    except subprocess.TimeoutExpired:
        _log.warning("%s gave no answer within %.0f s", program, HELPER_DEADLINE_S)
        return None
    except OSError as error:
        _log.warning("cannot run %s, which %s asks for: %s", program, path, error.strerror)
        return None
    if code != 0:
        # The helper has no login. Its message may hold secrets.
        _log.debug("%s has no login for %s", program, server)
        return None
    try:
        answer = _ANSWER.decode(said, program)
    except CorruptError:
        _log.warning("the answer of %s is not what a credential helper says", program)
        return None
    if answer.username == _TOKEN_USER:
        return Credential("", identity_token=answer.secret)
    is_known = answer.username or answer.secret
    return Credential(answer.username, answer.secret) if is_known else None


def _from_auths(
    config: Mapping[str, Any], host: str, repository: str, path: Path
) -> Credential | None:
    auths = config.get("auths")
    if not isinstance(auths, dict):
        return None
    by_name = {_plain_name(key): value for key, value in auths.items() if isinstance(value, dict)}
    # The most specific wins (containers-auth.json(5)): host/team/image, host/team, host.
    parts = repository.split("/")
    for count in range(len(parts), -1, -1):
        entry = by_name.get("/".join((host, *parts[:count])))
        credential = _from_entry(entry, path) if entry else None
        if credential:
            return credential
    return None


def _plain_name(key: str) -> str:
    """Return "docker.io" for "https://index.docker.io/v1/", and so on for other servers."""
    name = re.sub("^https?://", "", key)
    name = re.sub("/v[12]/?$", "", name).rstrip("/")
    first, slash, rest = name.partition("/")
    return (DOCKER_HUB if first in ("index.docker.io", "registry-1.docker.io") else first) + (
        slash + rest
    )


def _from_entry(entry: Mapping[str, Any], path: Path) -> Credential | None:
    def text(key: str) -> str:
        value = entry.get(key)
        return value if isinstance(value, str) else ""

    username, password = text("username"), text("password")
    if text("auth"):
        try:
            decoded = base64.b64decode(text("auth"), validate=True).decode()
            username, colon, password = decoded.partition(":")
        except (binascii.Error, ValueError):
            colon = ""
        if not colon:
            _log.warning("%s has a login that is not base64 of USER:PASSWORD; it is not used", path)
            return None
        # Docker on Windows pads passwords.
        password = password.rstrip("\0")
    if text("identitytoken"):
        return Credential(username, identity_token=text("identitytoken"))
    return Credential(username, password) if username or password else None
