"""Backend for the objects beside an image: `oci://HOST/REPOSITORY@sha256:DIGEST`, or `:TAG`.

An object appears whole, with its manifest. Exclusive creation is decided afterwards: of several
writers of one key, the first by their clocks keeps the key and the others withdraw. On a registry
without the referrers API a writer may go unnoticed. So two nodes may hold one lease: they do the
same work twice, and publish the same result. Format: docs/format/oci.md. Thread-safe.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
    from_oserror,
)
from bootseer.registry.client import open_registry_client
from bootseer.registry.reference import parse_reference
from bootseer.settings.config import load_settings
from bootseer.store.backend import Backend, FileInfo, Space, Traits
from bootseer.store.oci.object_list import ObjectList
from bootseer.store.oci.objects import OciObject
from bootseer.store.paths import PathMixin, check_range, split_path
from bootseer.store.spool import SPOOL_BYTES, SpoolingWriter
from bootseer.transfer.attempt import Attempt

PREFIX = "oci://"
_PIECE_BYTES = 4 << 20


class OciBackend(PathMixin, Backend):
    """Objects beside one image."""

    traits = Traits()

    def __init__(self, url: str, deadline_s: float | None = None) -> None:
        settings = load_settings()
        reference = parse_reference(url.removeprefix(PREFIX))
        self.url = f"{PREFIX}{reference}"
        self._client = open_registry_client(
            reference,
            hosts_dir=settings.registry_hosts_dir,
            deadline_s=deadline_s or settings.deadline_s,
            wait_budget=WAIT_BUDGET,
        )
        self._listed = ObjectList(self._client, reference, self.url)

    def stat(self, path: str) -> FileInfo:
        split_path(path)
        stored = self._listed.find(path)
        if stored is not None:
            return _info(stored)
        if not path or any(key.startswith(f"{path}/") for key in self._listed.known()):
            return FileInfo(path, 0, 0, True)
        raise NotFoundError(f"cannot look at {self._name(path)}: it does not exist")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        stored = self._stored(path, offset, length or 0)
        left = max(0, stored.size_bytes - offset)
        file = self._client.file(stored.digest, stored.size_bytes)
        return file.read(offset, left if length is None else min(length, left))

    def _stored(self, path: str, offset: int, length: int = 0) -> OciObject:
        """Return the object at `path`, after checking the range. Raises: as `read`."""
        split_path(path)
        check_range(offset, length)
        stored = self._listed.find(path)
        if stored is None:
            if any(key.startswith(f"{path}/") for key in self._listed.known()):
                raise InvalidInputError(f"cannot read {self._name(path)}: it is a folder")
            raise NotFoundError(f"cannot read {self._name(path)}: it does not exist")
        return stored

    def read_into(
        self, path: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        if attempt is None:
            data = self.read(path, offset, len(buffer))
            buffer[: len(data)] = data
            return len(data)
        stored = self._stored(path, offset)
        file = self._client.file(stored.digest, stored.size_bytes)
        return file.read_into(offset, buffer, attempt)

    def create(self, path: str, *, overwrite: bool = False) -> SpoolingWriter:
        self._names_of_file(path)
        if not overwrite and self._listed.find(path) is not None:
            raise AlreadyExistsError(f"cannot create {self._name(path)}: it exists already")
        self._check_folders(path.split("/")[:-1])
        return SpoolingWriter(partial(self._put, path, overwrite), self._name(path))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self._names_of_file(source)
        self._names_of_file(target)
        stored = self._listed.find(source)
        if stored is None:
            if self.stat(source).is_dir:
                raise UnsupportedError(f"{self.url} cannot rename a folder in one step")
            raise NotFoundError(f"cannot rename {self._name(source)}: it does not exist")
        if source != target:
            self._listed.add(target, stored.digest, stored.size_bytes, overwrite=overwrite)
            self.delete(source)

    def list(self, path: str) -> Iterator[FileInfo]:
        split_path(path)
        prefix = f"{path}/" if path else ""
        found: dict[str, FileInfo] = {}
        objects = self._listed.fresh()
        if path in objects:
            raise NotFoundError(f"cannot list {self._name(path)}: it is no folder")
        for key, stored in objects.items():
            if key.startswith(prefix):
                name, slash, _ = key[len(prefix) :].partition("/")
                full = prefix + name
                found[full] = FileInfo(full, 0, 0, True) if slash else _info(stored)
        if not found and path:
            raise NotFoundError(f"cannot list {self._name(path)}: it does not exist")
        return iter(sorted(found.values(), key=lambda info: info.path))

    def mkdir(self, path: str) -> None:
        """Check the path; nothing is created, since a folder exists while an object is in it."""
        self._check_folders(split_path(path))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        self._names_of_file(path)
        self._listed.remove(path, recursive=recursive)

    def space(self) -> Space | None:
        """Return None: a registry does not tell its capacity."""
        return None

    def close(self) -> None:
        """Check that published objects are still listed, and close all connections. Idempotent."""
        self._listed.settle()
        self._client.close()

    def _check_folders(self, names: Sequence[str]) -> None:
        known = self._listed.known()
        for count in range(1, len(names) + 1):
            path = "/".join(names[:count])
            if path in known:
                raise InvalidInputError(f"{self._name(path)} is no folder")

    def _put(self, path: str, overwrite: bool, spool: IO[bytes], size_bytes: int) -> None:
        sha = hashlib.sha256()
        try:
            while piece := spool.read(_PIECE_BYTES):
                sha.update(piece)
            spool.seek(0)
            # A large spool is a file without a name, which can be reopened through its descriptor.
            small = size_bytes <= SPOOL_BYTES
            data = spool.read() if small else Path(f"/proc/self/fd/{spool.fileno()}")
        except OSError as error:
            raise from_oserror(error, f"write {self._name(path)}") from error
        digest = f"sha256:{sha.hexdigest()}"
        self._client.push_blob(digest, data)
        self._listed.add(path, digest, size_bytes, overwrite=overwrite)


def _info(stored: OciObject) -> FileInfo:
    return FileInfo(stored.key, stored.size_bytes, stored.written_ns, False)
