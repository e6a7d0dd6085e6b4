"""`RegistryClient`: one repository of a registry, whichever of its servers answers.

Servers are asked as configured, those that failed lately last. What the registry itself says (not
found, no access) is final; what a mirror says is so only when no other server knows better. Rounds
over all servers follow the policy of attempts. What a digest names is verified before it is
returned, and asked for elsewhere where it is wrong; only files (`file`) are left to their readers.
Thread-safe.

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
from typing import Any, BinaryIO, TypeVar

from bootseer.base.closing import Closing
from bootseer.base.documents import is_digest
from bootseer.base.wait_budget import WaitBudget
from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.http.ranges import Range, RangedFile
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
from bootseer.registry.hosts import DEFAULT_HOSTS_DIR, Host, load_hosts
from bootseer.registry.reference import Reference
from bootseer.registry.session import Body, Session
from bootseer.transfer.pace import Pace
from bootseer.transfer.policy import REQUEST, Attempts, Policy

_log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 8 * 2**20
"""Twice what registries accept."""
_ACCEPTED = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
_PAGES_MAX = 1000
_UPLOAD_BYTES_PER_S = 5_000_000
"""What an upload may be as slow as, including what the registry does with it at its end: those on
object stores copy a blob then."""
_GIVERS_MAX = 1000
"""More than are read between two looks at one blob."""
_NEXT = re.compile(r'<([^<>]*)>\s*;[^<]*\brel="?next\b')


_Result = TypeVar("_Result")


class RegistryClient(Closing):
    """Client of one repository. Close it, or use it as a context manager."""

    def __init__(
        self,
        repository: str,
        hosts: Sequence[Host],
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
            patience: Seconds that all requests which bring nothing may take together.
        """
        own = next((host for host in hosts if host.is_registry), hosts[-1])
        self.name = f"{own.name}/{repository}"
        """For messages."""
        self._deadline_s = deadline_s
        self._policy = policy
        wait_budget = wait_budget or WaitBudget()
        self._sessions = [
            Session(host, repository, find_login, deadline_s, wait_budget) for host in hosts
        ]
        self._pace = Pace()
        self._givers: OrderedDict[str, Callable[[], None]] = OrderedDict()
        """Per blob read from its start lately: notes a failure of the server that gave it."""
        self._has_referrers = True
        """Until the registry says that it has no such thing."""

    def _ask(
        self, capability: str, function: Callable[[Session], _Result], *, more_s: float = 0.0
    ) -> _Result:
        """Return what `function` returns for the first server with `capability` for which it
        succeeds. No round begins later than the deadline and `more_s`.

        Raises: what `function` raised; UnsupportedError where no server has the capability.
        """
        attempts = Attempts(self._policy, self._deadline_s + more_s)
        while True:
            try:
                return self._ask_each(capability, function)
            except BootseerError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
                _log.info("attempt %d: %s", attempts.failures_count, error)
                time.sleep(pause_s)

    def _ask_each(
        self,
        capability: str,
        function: Callable[[Session], _Result],
        *,
        is_second: bool = False,
    ) -> _Result:
        """Ask each server once. `is_second`: the first one is late, and asked last.

        Raises: as `_ask`.
        """
        able = [one for one in self._sessions if capability in one.host.capabilities]
        if not able:
            raise UnsupportedError(f"no server of {self.name} is configured for {capability}")
        if is_second:
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
            # The one that asks for the shortest wait.
            raise min(reversed(transient), key=lambda e: getattr(e, "retry_after_s", 0.0))
        assert final is not None
        raise final

    def manifest(self, target: str, *, for_update: bool = False) -> Document:
        """Return the manifest or index that a tag or a digest names.

        `for_update`: ask a server that may be written to, not a mirror that remembers.

        Raises: NotFoundError, PermissionDeniedError, UnavailableError, DeadlineError,
        CorruptError where it is not what the digest says.
        """
        by_digest = ":" in target

        def get(session: Session) -> Document:
            response = session.open("GET", f"manifests/{target}", headers={"Accept": _ACCEPTED})
            data = response.read_all(MANIFEST_BYTES_MAX, self._deadline_s)
            said = response.headers.get("Docker-Content-Digest", "")
            expected = target if by_digest else said
            digest = digest_of(data, expected.partition(":")[0] or "sha256")
            if expected and digest != expected:
                raise CorruptError(f"{session.name}: the manifest {target} has the digest {digest}")
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
            return Document(digest, media_type, data)

        if for_update:
            return self._ask("push", get)
        return self._ask("pull" if by_digest else "resolve", get)

    def for_this_machine(self, document: Document, where: str) -> Document:
        """Return the manifest for this machine: `document`, or one that it leads to as an index.

        `where`: what to call the image in messages. Raises: as `manifest_for_this_machine`, and
        `manifest`.
        """
        return manifest_for_this_machine(document, lambda one: self.manifest(one.digest), where)

    def resolve(self, tag: str) -> str:
        """Return the digest of the manifest that `tag` names now; most registries tell it without
        sending the manifest. Raises: as `manifest`."""

        def head(session: Session) -> str:
            response = session.open("HEAD", f"manifests/{tag}", headers={"Accept": _ACCEPTED})
            response.close()
            return response.headers.get("Docker-Content-Digest", "")

        digest = self._ask("resolve", head)
        return digest if is_digest(digest) else self.manifest(tag).digest

    def blob(self, digest: str, size_max_bytes: int) -> bytes:
        """Return a small blob, verified. Raises: as `manifest`."""

        def get(session: Session) -> bytes:
            response = session.open("GET", f"blobs/{digest}")
            data = response.read_all(size_max_bytes, self._deadline_s)
            if digest_of(data, digest.partition(":")[0]) != digest:
                raise CorruptError(f"{session.name}: the blob {digest} has other contents")
            return data

        return self._ask("pull", get)

    def file(self, digest: str, size_bytes: int) -> RangedFile:
        """Return a blob of `size_bytes` to be read by ranges, or in order. Its size is checked, its
        digest is not: who reads it to its end, and finds it wrong, opens it again."""
        return RangedFile(
            partial(self._ask_range, digest, size_bytes),
            size_bytes,
            f"{self.name}@{digest[:19]}",
            pace=self._pace,
            policy=self._policy,
            deadline_s=self._deadline_s,
        )

    def open(self, digest: str, size_bytes: int) -> BinaryIO:
        """Return a whole blob of `size_bytes` to be read in order. `read` raises as `manifest`.

        When the same blob is opened again, another server is asked first: the last one gave wrong
        bytes.
        """
        if blame := self._givers.pop(digest, None):
            blame()
        return self.file(digest, size_bytes).open()

    def _ask_range(
        self, digest: str, size_bytes: int, start: int, end: int, is_second: bool
    ) -> Range:
        def get(session: Session) -> Range:
            headers = {"Range": f"bytes={start}-{end - 1}"}
            response = session.open("GET", f"blobs/{digest}", headers=headers)
            name = f"{session.name}@{digest[:19]}"
            found = Range(
                response, name, start, end, size_bytes=size_bytes, blame=session.note_failure
            )
            if start == 0:
                self._givers[digest] = session.note_failure
                # A server that lives for weeks reads blobs without number.
                while len(self._givers) > _GIVERS_MAX:
                    with contextlib.suppress(KeyError):  # another thread was faster
                        self._givers.popitem(last=False)
            return found

        return self._ask_each("pull", get, is_second=is_second)

    def referrers(self, digest: str, artifact_type: str) -> list[Mapping[str, Any]]:
        """Return descriptors of the artifacts of `artifact_type` whose subject is a manifest.

        They come in no order, and are not verified: through the referrers API, or from the tag that
        stands in for it.

        Raises: as `manifest`, but for NotFoundError.
        """
        pages: list[Mapping[str, Any]] = []
        if self._has_referrers:
            try:
                query = {"artifactType": artifact_type}
                pages = list(self._pages("pull", f"referrers/{digest}", query))
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
        """Return the list under the tag that stands in for the referrers API, of any type; [] where
        there is no such tag. Raises: as `manifest`, but for NotFoundError."""
        try:
            data = self.manifest(fallback_tag(digest), for_update=for_update).data
        except NotFoundError:
            return []
        entries = parse_object(data, self.name).get("manifests")
        return entries if isinstance(entries, list) else []

    def tag_referrers(self, digest: str, entries: Sequence[Any]) -> None:
        """Replace that list. Raises: as `push_blob`; InvalidInputError where a manifest that it
        names is missing."""
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(entries)}
        self.push_manifest(fallback_tag(digest), INDEX_TYPE, json.dumps(index).encode())

    def _pages(
        self, capability: str, path: str, query: Mapping[str, str]
    ) -> Iterator[Mapping[str, Any]]:
        def get(session: Session) -> tuple[Mapping[str, Any], str]:
            response = session.open("GET", url, query=query)
            data = response.read_all(MANIFEST_BYTES_MAX, self._deadline_s)
            link = _NEXT.search(response.headers.get("Link", ""))
            return parse_object(data, session.name), link[1] if link else ""

        url = path
        for _ in range(_PAGES_MAX):
            page, url = self._ask(capability, get)
            yield page
            if not url:
                return
            query = {}
        raise CorruptError(f"{self.name}: the list at {path} has no end")

    def push_blob(self, digest: str, data: bytes | Path) -> None:
        """Upload a blob in one piece, unless the registry has it. Durable when it returns.

        Raises: PermissionDeniedError, UnavailableError, DeadlineError, InvalidInputError.
        """
        size_bytes = data.stat().st_size if isinstance(data, Path) else len(data)
        more_s = size_bytes / _UPLOAD_BYTES_PER_S
        body: Body = partial(_open_file, data) if isinstance(data, Path) else data

        def push(session: Session) -> None:
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
        """Store a manifest under a tag or its digest. Return True where the registry says that it
        lists the manifest among the referrers of its subject. Raises: as `push_blob`."""

        def push(session: Session) -> bool:
            headers = {"Content-Type": media_type}
            response = session.open("PUT", f"manifests/{target}", headers=headers, body=data)
            response.close()
            return bool(response.headers.get("OCI-Subject"))

        return self._ask("push", push)

    def delete_manifest(self, digest: str) -> None:
        """Remove a manifest; a missing one is no error.

        Raises: UnsupportedError where the registry does not allow it; as `push_blob`.
        """

        def delete(session: Session) -> None:
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
    """Return a client for the repository of `reference`; nothing is asked yet.

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
