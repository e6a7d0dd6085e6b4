"""`RegistryClient`: one repository of a registry, whichever of its servers answers.

Owns the requests, and what their answers mean. What a digest names is verified before it is
returned, and asked for elsewhere where it is wrong; only streams and ranges are left to their
readers. Thread-safe.

The protocol: github.com/opencontainers/distribution-spec, version 1.1.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from bootseer.base.closing import Closing
from bootseer.base.documents import is_digest
from bootseer.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.registry.blobs import BlobReader
from bootseer.registry.credentials import Credential, find_credential
from bootseer.registry.documents import (
    INDEX_TYPE,
    INDEX_TYPES,
    MANIFEST_TYPES,
    Document,
    digest_of,
    fallback_tag,
    parse_object,
)
from bootseer.registry.hosts import DEFAULT_HOSTS_DIR, Host, load_hosts
from bootseer.registry.reference import Reference
from bootseer.registry.servers import Servers
from bootseer.registry.session import Body, Session
from bootseer.transfer.policy import REQUEST, Policy

MANIFEST_BYTES_MAX = 8 * 2**20
"""Twice what registries accept."""
_ACCEPTED = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
_PAGES_MAX = 1000
_UPLOAD_BYTES_PER_S = 5_000_000
"""What an upload may be as slow as, including what the registry does with it at its end: those on
object stores copy a blob then."""
_NEXT = re.compile(r'<([^<>]*)>\s*;[^<]*\brel="?next\b')


class RegistryClient(Closing):
    """One repository. Close it, or use it as a context manager."""

    def __init__(
        self,
        repository: str,
        hosts: Sequence[Host],
        *,
        find_login: Callable[[str, str], Credential | None] = find_credential,
        deadline_s: float = 60.0,
        policy: Policy = REQUEST,
    ) -> None:
        """`hosts`: in the order in which to ask, the registry itself last. No single wait is
        longer than `deadline_s`, and no operation without progress."""
        self._deadline_s = deadline_s
        self._has_referrers = True
        """Until the registry says that it has no such thing."""
        self._servers = Servers(repository, hosts, find_login, deadline_s, policy)
        self._ask = self._servers.ask
        self.name = self._servers.name
        """For messages."""
        self.blobs = BlobReader(self._servers, deadline_s)
        """Where they are not small: ranges, and streams."""

    def manifest(self, target: str, *, for_update: bool = False) -> Document:
        """The manifest or index that a tag or a digest names. `for_update`: as a server says that
        may be written to, not what a mirror remembers.

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

    def resolve(self, tag: str) -> str:
        """The digest of the manifest that `tag` names now, without fetching it where the registry
        tells. Raises: as `manifest`."""

        def head(session: Session) -> str:
            response = session.open("HEAD", f"manifests/{tag}", headers={"Accept": _ACCEPTED})
            response.close()
            return response.headers.get("Docker-Content-Digest", "")

        digest = self._ask("resolve", head)
        return digest if is_digest(digest) else self.manifest(tag).digest

    def blob(self, digest: str, size_max_bytes: int) -> bytes:
        """A small blob, verified. Raises: as `manifest`."""

        def get(session: Session) -> bytes:
            response = session.open("GET", f"blobs/{digest}")
            data = response.read_all(size_max_bytes, self._deadline_s)
            if digest_of(data, digest.partition(":")[0]) != digest:
                raise CorruptError(f"{session.name}: the blob {digest} has other contents")
            return data

        return self._ask("pull", get)

    def tags(self) -> list[str]:
        """All tags, as the registry orders them. Raises: as `manifest`."""
        return [
            tag
            for page in self._pages("resolve", "tags/list", {})
            for tag in page.get("tags") or []
            if isinstance(tag, str)
        ]

    def referrers(self, digest: str, artifact_type: str) -> list[Mapping[str, Any]]:
        """Descriptors of the artifacts of `artifact_type` whose subject is the manifest `digest`,
        in no order: through the referrers API, or the tag that stands in for it. Not verified.

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
        """What the tag that stands in for the referrers API lists, of any type; [] where there is
        no such tag. Raises: as `manifest`, but for NotFoundError."""
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
        """Store a manifest under a tag or its digest; whether the registry says that it lists it
        among its subject's referrers. Raises: as `push_blob`."""

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
        self._servers.close()


def open_registry_client(
    reference: Reference, *, hosts_dir: Path = DEFAULT_HOSTS_DIR, deadline_s: float = 60.0
) -> RegistryClient:
    """A client for the repository of `reference`; nothing is asked yet.

    Raises: InvalidInputError, PermissionDeniedError for a hosts file that cannot be used.
    """
    hosts = load_hosts(reference.host, hosts_dir)
    return RegistryClient(reference.repository, hosts, deadline_s=deadline_s)


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise from_oserror(error, f"read {path}") from error
