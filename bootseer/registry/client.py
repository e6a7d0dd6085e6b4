"""Client of one repository of a registry, which is served by the registry itself and by mirrors.

Servers are asked in the configured order, except that servers which failed lately come last. An
answer such as "not found" or "no access" is final from the registry itself; from a mirror, only if
no other server has a better answer. The policy of attempts decides about further rounds over all
servers. Manifests and blobs are verified before they are returned, and requested from another
server if they are wrong; the bytes of `file` are verified by their reader. Thread-safe.

The protocol: github.com/opencontainers/distribution-spec, version 1.1.
"""

import contextlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar
from urllib.parse import urlencode, urlsplit

from msgspec import Meta, Struct

from bootseer.base.closing import Closing
from bootseer.base.documents import DocumentFormat, is_digest
from bootseer.base.wait_budget import WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.http.ranges import RangedFile, RangeResponse
from bootseer.http.transport import Response, Transport, joined
from bootseer.registry.credentials import Credential, find_credential
from bootseer.registry.documents import (
    INDEX_TYPE,
    INDEX_TYPES,
    MANIFEST_TYPES,
    Document,
    digest_of,
    fallback_tag,
    manifest_for_this_machine,
    parse_object,
)
from bootseer.registry.hosts import DEFAULT_HOSTS_DIR, RegistryHost, load_hosts
from bootseer.registry.reference import Reference
from bootseer.registry.tokens import Authorizer
from bootseer.transfer.pace import Pace
from bootseer.transfer.policy import REQUEST, Attempts, Policy, is_transient

_log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 8 * 2**20
"""Twice what registries accept."""
_ACCEPTED = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
_PAGES_MAX = 1000
_UPLOAD_BYTES_PER_S = 5_000_000
"""Slowest upload, including the time at its end in which a registry on an object store copies the
blob."""
_BLOB_SERVERS_MAX = 1000
"""Blobs whose server is remembered."""
_NEXT = re.compile(r'<([^<>]*)>\s*;[^<]*\brel="?next\b')

_Result = TypeVar("_Result")

# ---- one server ----------------------------------------------------------------------------------

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


# ---- all servers of the repository ---------------------------------------------------------------


class RegistryClient(Closing):
    """Client of one repository. Close it, or use it as a context manager."""

    def __init__(
        self,
        repository: str,
        hosts: Sequence[RegistryHost],
        *,
        find_login: Callable[[str, str], Credential | None] = find_credential,
        deadline_s: float = 60.0,
        policy: Policy = REQUEST,
        wait_budget: WaitBudget | None = None,
    ) -> None:
        """Make a client; no server is asked.

        Args:
            repository: Name of the repository.
            hosts: Servers in the order in which to ask, the registry itself mostly last.
            find_login: Returns the login for a repository on a host.
            deadline_s: Longest wait, and longest operation without progress.
            policy: Rounds over all servers.
            wait_budget: Seconds that all unsuccessful requests may take together.
        """
        own = next((host for host in hosts if host.is_registry), hosts[-1])
        self.name = f"{own.name}/{repository}"
        """Name of the repository in messages."""
        self._deadline_s = deadline_s
        self._policy = policy
        self._wait_budget = wait_budget = wait_budget or WaitBudget()
        self._sessions = [
            RegistrySession(host, repository, find_login, deadline_s, wait_budget) for host in hosts
        ]
        self._pace = Pace()
        self._note_blob_failure: OrderedDict[str, Callable[[], None]] = OrderedDict()
        """Digest of a blob read lately -> function that notes a failure of the blob's server."""
        self._has_referrers = True
        """Whether the registry may have the referrers API."""

    def _ask(
        self,
        capability: str,
        function: Callable[[RegistrySession], _Result],
        *,
        more_s: float = 0.0,
    ) -> _Result:
        """Call `function` for servers with `capability` until one succeeds; return its result.

        No round over the servers begins later than `more_s` after the deadline. Raises: the error
        of `function`; UnsupportedError if no server has the capability.
        """
        attempts = Attempts(self._policy, self._deadline_s + more_s, wait_budget=self._wait_budget)
        while True:
            try:
                return self._ask_each(capability, function)
            except BootseerError as error:
                _log.info("attempt %d: %s", attempts.failures_count + 1, error)
                attempts.wait(error)

    def _ask_each(
        self,
        capability: str,
        function: Callable[[RegistrySession], _Result],
        *,
        asks_elsewhere: bool = False,
    ) -> _Result:
        """Ask each server once; with `asks_elsewhere` the first one last, because it is late.

        Raises: as `_ask`.
        """
        able = [one for one in self._sessions if capability in one.host.capabilities]
        if not able:
            raise UnsupportedError(f"no server of {self.name} is configured for {capability}")
        if asks_elsewhere:
            able = [*able[1:], able[0]]
        transient: list[BootseerError] = []
        final: BootseerError | None = None
        for session in sorted(able, key=lambda one: one.is_suspect):
            try:
                return function(session)
            except (UnavailableError, DeadlineError, CorruptError) as error:
                session.note_failure()
                transient.append(error)
            except BootseerError as error:
                if session.host.is_registry or session is able[-1]:
                    raise
                final = error
        if transient:
            # The error with the shortest wait.
            raise min(reversed(transient), key=lambda e: getattr(e, "retry_after_s", 0.0))
        assert final is not None
        raise final

    def manifest(self, target: str, *, for_update: bool = False) -> Document:
        """Return the manifest or index that a tag or a digest names.

        `for_update`: ask a server that takes uploads instead of a mirror, which may be outdated.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError,
        CorruptError if the document does not have the digest.
        """
        by_digest = ":" in target

        def get(session: RegistrySession) -> Document:
            response = session.open("GET", f"manifests/{target}", headers={"Accept": _ACCEPTED})
            data = response.read_all(MANIFEST_BYTES_MAX, self._deadline_s)
            expected = target
            if not by_digest:
                expected = response.headers.get("Docker-Content-Digest", "")
            digest = digest_of(data, expected.partition(":")[0] or "sha256")
            if expected and digest != expected:
                raise CorruptError(f"{session.name}: the manifest {target} has the digest {digest}")
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
            return Document(digest, media_type, data)

        if for_update:
            return self._ask("push", get)
        return self._ask("pull" if by_digest else "resolve", get)

    def for_this_machine(self, document: Document, where: str) -> Document:
        """Return the manifest for this machine: `document`, or a manifest that this index leads to.

        `where`: name of the image in messages. Raises: as `manifest_for_this_machine` and
        `manifest`.
        """
        return manifest_for_this_machine(document, lambda one: self.manifest(one.digest), where)

    def resolve(self, tag: str) -> str:
        """Return the digest of the manifest that `tag` names now. Raises: as `manifest`.

        Most registries send the digest without the manifest.
        """

        def head(session: RegistrySession) -> str:
            response = session.open("HEAD", f"manifests/{tag}", headers={"Accept": _ACCEPTED})
            response.close()
            return response.headers.get("Docker-Content-Digest", "")

        digest = self._ask("resolve", head)
        return digest if is_digest(digest) else self.manifest(tag).digest

    def blob(self, digest: str, size_max_bytes: int) -> bytes:
        """Return a small blob, verified. Raises: as `manifest`."""

        def get(session: RegistrySession) -> bytes:
            response = session.open("GET", f"blobs/{digest}")
            data = response.read_all(size_max_bytes, self._deadline_s)
            if digest_of(data, digest.partition(":")[0]) != digest:
                raise CorruptError(f"{session.name}: the blob {digest} has other contents")
            return data

        return self._ask("pull", get)

    def file(self, digest: str, size_bytes: int) -> RangedFile:
        """Return a blob as a file that is read by ranges or in order.

        The size is checked, the digest is not. A reader that finds a wrong digest opens the file
        again.
        """
        return RangedFile(
            partial(self._ask_range, digest, size_bytes),
            size_bytes,
            f"{self.name}@{digest[:19]}",
            pace=self._pace,
            policy=self._policy,
            deadline_s=self._deadline_s,
        )

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Open a blob for reading from start to end. `read` raises as `manifest`.

        If the same blob is opened again, another server is asked first, because the last one sent
        wrong bytes.
        """
        if note_failure := self._note_blob_failure.pop(digest, None):
            note_failure()
        return self.file(digest, size_bytes).open()

    def _ask_range(
        self, digest: str, size_bytes: int, start: int, end: int, asks_elsewhere: bool
    ) -> RangeResponse:
        def get(session: RegistrySession) -> RangeResponse:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            response = session.open("GET", f"blobs/{digest}", headers=headers)
            name = f"{session.name}@{digest[:19]}"
            found = RangeResponse(
                response,
                name,
                start,
                end,
                deadline_s=self._deadline_s,
                size_bytes=size_bytes,
                blame=session.note_failure,
            )
            if start == 0:
                self._note_blob_failure[digest] = session.note_failure
                # A process that lives for weeks reads any number of blobs.
                while len(self._note_blob_failure) > _BLOB_SERVERS_MAX:
                    with contextlib.suppress(KeyError):  # Another thread was faster.
                        self._note_blob_failure.popitem(last=False)
            return found

        return self._ask_each("pull", get, asks_elsewhere=asks_elsewhere)

    def referrers(self, digest: str, artifact_type: str) -> list[Mapping[str, Any]]:
        """Return descriptors of the artifacts of `artifact_type` whose subject is a manifest.

        They come from the referrers API, or from the tag that replaces it, in no order, and are not
        verified. Raises: as `manifest`, except NotFoundError.
        """
        pages: list[Mapping[str, Any]] = []
        if self._has_referrers:
            try:
                query = {"artifactType": artifact_type}
                pages = list(self._pages(f"referrers/{digest}", query))
            except (NotFoundError, UnsupportedError, InvalidInputError):
                self._has_referrers = False
        if not self._has_referrers:
            pages = [{"manifests": self.tagged_referrers(digest)}]
        return [
            entry
            for page in pages
            for entry in page.get("manifests") or []
            if isinstance(entry, dict) and entry.get("artifactType") == artifact_type
        ]

    def tagged_referrers(self, digest: str, *, for_update: bool = False) -> list[Any]:
        """Return the list under the tag that replaces the referrers API; [] without such a tag.

        Raises: as `manifest`, except NotFoundError.
        """
        try:
            data = self.manifest(fallback_tag(digest), for_update=for_update).data
        except NotFoundError:
            return []
        entries = parse_object(data, self.name).get("manifests")
        return entries if isinstance(entries, list) else []

    def tag_referrers(self, digest: str, entries: Sequence[Any]) -> None:
        """Replace the list that `tagged_referrers` returns.

        Raises: as `push_blob`; InvalidInputError if a manifest in the list is missing.
        """
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(entries)}
        self.push_manifest(fallback_tag(digest), INDEX_TYPE, json.dumps(index).encode())

    def _pages(self, path: str, query: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        def get(session: RegistrySession) -> tuple[Mapping[str, Any], str]:
            response = session.open("GET", url, query=query)
            data = response.read_all(MANIFEST_BYTES_MAX, self._deadline_s)
            link = _NEXT.search(response.headers.get("Link", ""))
            return parse_object(data, session.name), link[1] if link else ""

        url = path
        for _ in range(_PAGES_MAX):
            page, url = self._ask("pull", get)
            yield page
            if not url:
                return
            query = {}
        raise CorruptError(f"{self.name}: the list at {path} has no end")

    def push_blob(self, digest: str, data: bytes | Path) -> None:
        """Upload a blob in one piece, unless the registry has it. It is durable on return.

        Raises: PermissionDeniedError, UnavailableError, DeadlineError, InvalidInputError.
        """
        size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
        more_s = size_bytes / _UPLOAD_BYTES_PER_S
        body: Body = partial(_open_file, data) if isinstance(data, Path) else data

        def push(session: RegistrySession) -> None:
            try:
                session.open("HEAD", f"blobs/{digest}").close()
                return
            except NotFoundError:
                pass
            started = session.open("POST", "blobs/uploads/", body=b"", content_length=0)
            started.close()
            location = started.headers.get("Location", "")
            if not location:
                raise UnavailableError(f"{session.name} does not tell where to upload to")
            session.open(
                "PUT",
                location,
                headers={"Content-Type": "application/octet-stream"},
                query={"digest": digest},
                body=body,
                content_length=size_bytes,
                more_s=more_s,
            ).close()

        self._ask("push", push, more_s=more_s)

    def push_manifest(self, target: str, media_type: str, data: bytes) -> bool:
        """Store a manifest under a tag or its digest.

        Returns: True if the registry says that it lists the manifest among its subject's referrers.
        Raises: as `push_blob`.
        """

        def push(session: RegistrySession) -> bool:
            headers = {"Content-Type": media_type}
            response = session.open("PUT", f"manifests/{target}", headers=headers, body=data)
            response.close()
            return bool(response.headers.get("OCI-Subject"))

        return self._ask("push", push)

    def delete_manifest(self, digest: str) -> None:
        """Remove a manifest; a missing one is no error.

        Raises: UnsupportedError if the registry does not allow it; as `push_blob`.
        """

        def delete(session: RegistrySession) -> None:
            session.open("DELETE", f"manifests/{digest}").close()

        with contextlib.suppress(NotFoundError):
            self._ask("push", delete)

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        for session in self._sessions:
            session.close()


def open_registry_client(
    reference: Reference,
    *,
    hosts_dir: Path = DEFAULT_HOSTS_DIR,
    deadline_s: float = 60.0,
    wait_budget: WaitBudget | None = None,
) -> RegistryClient:
    """Return a client for the repository of `reference`; no server is asked.

    Raises: InvalidInputError, PermissionDeniedError for a hosts file that cannot be used.
    """
    hosts = load_hosts(reference.host, hosts_dir)
    return RegistryClient(
        reference.repository, hosts, deadline_s=deadline_s, wait_budget=wait_budget
    )


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise from_oserror(error, f"read {path}") from error
