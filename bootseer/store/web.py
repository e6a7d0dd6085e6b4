"""Read-only backend for the files of a web server (`http://`, `https://`).

The server has a copy of a store, and answers ranged requests. A path is a folder if the server
redirects it to the same path with "/". The contents of a folder are the links of its index page
(nginx, Apache, Python's http.server).

The head of each answer must arrive within the deadline; a body is given up when it is silent or
slower than the floor of `bootseer.transfer.pace`. Redirects follow the rules of `bootseer.http`: a
login in the URL is sent to this server only, and no redirect may lead to an internal address.

Thread-safe.
"""

import base64
import html
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from bootseer.base.redact import public_url
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    BootseerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.http.ranges import RangeResponse
from bootseer.http.transport import HttpServer, Response, Transport, date_of
from bootseer.store.backend import Backend, FileInfo, Traits, Writer
from bootseer.store.deadline import DEFAULT_DEADLINE_S
from bootseer.store.paths import check_range, split_path
from bootseer.transfer.attempt import Attempt
from bootseer.transfer.policy import REQUEST, Attempts, is_transient

_PIECE_BYTES = 1 << 20
_HEAD_UNSUPPORTED = (405, 501)
_PAGE_BYTES_MAX = 16 << 20
# Bounds the requests for a hostile index page: each file of a listing takes one.
_ENTRIES_MAX = 100_000
_PARALLEL_REQUESTS = 8
# Not html.parser: its time grows with the square of the length of some pages.
_LINK = re.compile(
    r"""<a\s[^<>]{0,2000}?\bhref\s{0,9}=\s{0,9}(?:"([^"<>]{0,9000})"|'([^'<>]{0,9000})'|([^\s<>"']{1,9000}))""",
    re.IGNORECASE,
)


class WebBackend(Backend):
    """Files below one URL of a web server."""

    traits = Traits()

    def __init__(self, url: str, deadline_s: float | None = None) -> None:
        self.url = public_url(url).rstrip("/")
        self._deadline_s = deadline_s or DEFAULT_DEADLINE_S
        try:
            parts = urlsplit(url)
            login, _, netloc = parts.netloc.rpartition("@")
            parts.port  # noqa: B018  # raises ValueError unless it is a number
        except ValueError:
            parts, login, netloc = urlsplit(""), "", ""
        if not parts.hostname:
            raise InvalidInputError(f"{self.url} names no server; write https://host/folder")
        self._root = f"{parts.scheme.lower()}://{netloc}{parts.path.rstrip('/')}"
        self._query = f"?{parts.query}" if parts.query else ""
        self._own = {}
        if login:
            login_bytes = unquote(login).encode(errors="replace")
            encoded = base64.b64encode(login_bytes).decode()
            self._own = {"Authorization": f"Basic {encoded}"}
        server = HttpServer(
            netloc,
            f"{parts.scheme.lower()}://{netloc}",
            ca_advice="name the file of its authority in SSL_CERT_FILE",
        )
        self._transport = Transport(server, self._deadline_s, WAIT_BUDGET)

    # ---- requests -----------------------------------------------------------------------------

    def _url_of(self, path: str, *, is_folder: bool = False) -> str:
        names = (quote(os.fsencode(name), safe="") for name in split_path(path))
        return "/".join((self._root, *names)) + ("/" if is_folder or not path else "") + self._query

    def _open(
        self,
        method: str,
        verb: str,
        path: str,
        headers: Mapping[str, str],
        *,
        is_folder: bool = False,
    ) -> Response:
        """Send one request and return its response, which the caller closes.

        The status is 200, 206, 416, or for HEAD one of `_HEAD_UNSUPPORTED`. Raises: BootseerError
        for any other status.
        """
        what = f"{verb} {self._name(path)}"
        url = self._url_of(path, is_folder=is_folder)

        try:
            response = self._transport.follow(method, url, headers, own_headers=self._own)
        except BootseerError as error:
            raise type(error)(f"cannot {what}: {error}") from error
        is_head_refused = method == "HEAD" and response.status in _HEAD_UNSUPPORTED
        if response.status in (200, 206, 416) or is_head_refused:
            return response
        response.close()
        raise _refusal(response, what)

    def _attempts(self) -> Attempts:
        return Attempts(REQUEST, self._deadline_s, wait_budget=WAIT_BUDGET)

    # ---- reading ------------------------------------------------------------------------------

    def stat(self, path: str) -> FileInfo:
        def ask() -> FileInfo:
            with self._open("HEAD", "look at", path, {}) as response:
                if _is_folder(response):
                    return FileInfo(path, 0, 0, True)
                size = response.headers.get("Content-Length", "")
                if response.status == 200 and size.isascii() and size.isdigit() and len(size) < 20:
                    return FileInfo(path, int(size), _modified_ns(response), False)
            with self._get("look at", path, 0, 1) as found:
                if found.total_bytes is None:
                    raise UnavailableError(
                        f"cannot look at {self._name(path)}: the server does not say its size"
                    )
                return FileInfo(path, found.total_bytes, 0, False)

        return self._attempts().repeat(ask)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        if length == 0:
            if self.stat(path).is_dir:
                raise InvalidInputError(f"cannot read {self._name(path)}: it is a folder")
            return b""
        end = None if length is None else offset + length

        def read() -> bytes:
            # One request for all of it, so that all bytes belong to the same version of the file.
            with self._get("read", path, offset, end) as found:
                return b"".join(iter(lambda: found.read(_PIECE_BYTES), b""))

        return self._attempts().repeat(read)

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if not buffer or offset < 0:
            return super().read_into(path, offset, buffer, attempt)
        with self._get("read", path, offset, offset + len(buffer)) as found:
            return found.read_into(buffer, attempt or Attempt())

    def _get(self, verb: str, path: str, start: int, end: int | None) -> RangeResponse:
        """Send one request for the bytes [start, end) of a file; None means its end."""
        headers = {}
        if start or end is not None:
            headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        response = self._open("GET", verb, path, headers)
        if _is_folder(response):
            response.close()
            raise InvalidInputError(f"cannot {verb} {self._name(path)}: it is a folder")
        return RangeResponse(response, self._name(path), start, end, deadline_s=self._deadline_s)

    def list(self, path: str) -> Iterator[FileInfo]:
        def ask() -> tuple[str, bytes]:
            with self._open("GET", "list", path, {}, is_folder=True) as response:
                return response.url, response.read_all(_PAGE_BYTES_MAX, self._deadline_s)

        url, page = self._attempts().repeat(ask)
        prefix = f"{path}/" if path else ""
        names = names_in(page.decode(errors="replace"), url)
        found = [FileInfo(prefix + name, 0, 0, True) for name, is_dir in names.items() if is_dir]
        files = [prefix + name for name, is_dir in names.items() if not is_dir]
        # Sizes and times in an index page cannot be relied on, so each file is asked for.
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, "bootseer-web-list") as pool:
            found += pool.map(self.stat, files)
        return iter(sorted(found, key=lambda info: info.path))

    # ---- writing, which is refused --------------------------------------------------------------

    def _refuse(self, verb: str, path: str) -> NoReturn:
        raise PermissionDeniedError(
            f"cannot {verb} {self._name(path)}: a web server is read-only; give the URL of the "
            "store itself to write to it"
        )

    def create(self, path: str, *, overwrite: bool = False) -> Writer:
        self._refuse("write", path)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._refuse("rename", source)

    def mkdir(self, path: str) -> None:
        self._refuse("create", path)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._refuse("delete", path)

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        self._transport.close()


def _refusal(response: Response, what: str) -> BootseerError:
    """Return the error that the status of a response stands for."""
    status, server = response.status, response.server
    if status in (404, 410):
        return NotFoundError(f"cannot {what}: it does not exist")
    if is_transient(status):
        return response.unavailable(f"cannot {what}: {server} answered {status}")
    if status in (401, 403, 407):
        return PermissionDeniedError(f"cannot {what}: {server} refuses it ({status})")
    return UnavailableError(f"cannot {what}: {server} answered {status}")


def _is_folder(response: Response) -> bool:
    return urlsplit(response.url).path.endswith("/")


def _modified_ns(response: Response) -> int:
    when = date_of(response.headers.get("Last-Modified", ""))
    return 0 if when is None else int(when.timestamp() * 1e9)


def names_in(page: str, url: str) -> dict[str, bool]:
    """Return the names directly below `url` that its index page links to, with True for folders.

    Links to other places are left out. Pure; takes time proportional to the length of the page.
    """
    folder = url.partition("?")[0]
    names: dict[str, bool] = {}
    for found in _LINK.finditer(page):
        link = html.unescape(found[1] or found[2] or found[3] or "")
        try:
            target = urljoin(folder, link).partition("#")[0]
        except ValueError:
            continue
        if not target.startswith(folder) or "?" in link:
            continue
        quoted = target[len(folder) :]
        name = unquote(quoted.removesuffix("/"), errors="surrogateescape")
        try:
            is_name = len(split_path(name)) == 1
        except InvalidInputError:
            continue
        if is_name and len(names) < _ENTRIES_MAX:
            names[name] = quoted.endswith("/")
    return names
