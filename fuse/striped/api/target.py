"""What is behind a striped file system of fsspec, and what its URLs and paths mean.

Owns the form of URLs (`bootseer::hdfs://namenode/checkpoints/step-1/model.pt`), the storage options
and how fsspec chains them: all instances for one target stand on one `StripedStorage` per process.
Thread-safe.
"""

import os
from functools import partial
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import tokenize

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.fuse.striped.api.shared import shared_storage
from bootseer.fuse.striped.layout import (
    DEFAULT_STRIPE_COUNT,
    DEFAULT_STRIPE_UNIT_BYTES,
)
from bootseer.fuse.striped.names.stored import is_hidden
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.settings.config import load_config
from bootseer.store import Backend, open_backend
from bootseer.store.paths import BUCKETS

PROTOCOL = "bootseer"
_LOCAL = ("file", "local")


class TargetFileSystem(ChainedFileSystem):  # type: ignore[misc] # fsspec has no types
    """The storage, and the names, of `CheckpointFileSystem`."""

    protocol = PROTOCOL
    # The path that a chained URL names: one instance serves all paths of a server.
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        *,
        fo: str | None = None,
        stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
        stripe_count: int = DEFAULT_STRIPE_COUNT,
        layout: LayoutKind = "striped",
        memory_bytes: int | None = None,
        deadline_s: float | None = None,
        **storage_options: Any,
    ) -> None:
        """`target_*`: the file system behind, which a chained URL names. The others: how files are
        striped, what this process may hold in memory for all files of the target, and the longest
        wait for the target without progress (both default to the settings of Bootseer).

        Raises: InvalidInputError.
        """
        super().__init__(**storage_options)
        if not target_protocol:
            raise InvalidInputError(
                "say what is striped: write bootseer::hdfs://namenode/checkpoints, or give "
                "target_protocol"
            )
        settings = load_config({}).settings
        stripes = StripeSettings(
            stripe_unit_bytes,
            stripe_count,
            settings.deadline_s if deadline_s is None else deadline_s,
            layout,
        )
        options = dict(target_options or {})
        options.pop("fo", None)
        memory = memory_bytes or settings.memory_bytes
        self._is_local = target_protocol in _LOCAL
        self._root_marker = _root_marker(target_protocol)
        self._target = target_protocol
        self._shared = shared_storage(
            (target_protocol, tokenize(options), stripes, memory),
            partial(_open_storage, target_protocol, options, stripes, memory),
        )

    @property
    def storage(self) -> StripedStorage:
        """What everything here stands on; opened on first use."""
        return self._shared.get()

    @property
    def fsid(self) -> str:
        """The identity of the file system: the same for all instances that reach the same files."""
        return f"{PROTOCOL}-{self.storage.backend.url}"

    # ---- paths ----------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """The path on the target that a URL or path means."""
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = fsspec.utils.stringify_path(path)
        for prefix in (f"{PROTOCOL}::", f"{PROTOCOL}://"):
            if path.startswith(prefix):
                path = path[len(prefix) :]
                if "://" in path and prefix.endswith("//"):
                    raise InvalidInputError(f"{prefix}{path}: write {PROTOCOL}::{path}")
        if "://" in path:
            target, rest = fsspec.core.split_protocol(path)
            if target in BUCKETS:
                return rest.rstrip("/")
            return fsspec.get_filesystem_class(target)._strip_protocol(path)
        return path.rstrip("/") or ("/" if path else "")

    def unstrip_protocol(self, name: str) -> str:
        """The full URL of a path."""
        path = self._strip_protocol(name)
        base = {"hdfs": self.storage.backend.url.rstrip("/"), "file": "file://", "local": "file://"}
        start = base.get(self._target, f"{self._target}:/")
        return f"{PROTOCOL}::{start}/{path.lstrip('/')}"

    def key(self, path: str, *, follow: bool = True) -> str:
        """The backend's path for a path of the target. Raises: NotFoundError for what is hidden.

        On a local file system symbolic links are followed; of the last name only with `follow`.
        """
        stripped: str = self._strip_protocol(path)
        if self._is_local:
            stripped = os.path.abspath(stripped or "/")
            if follow:
                stripped = os.path.realpath(stripped)
            else:
                parent, name = os.path.split(stripped)
                stripped = os.path.join(os.path.realpath(parent), name)
        names = [name for name in stripped.split("/") if name]
        if any(map(is_hidden, names)):
            raise NotFoundError(f"{path} does not exist")
        return "/".join(names)

    def shown_name(self, path: str) -> str:
        """How a path is shown in listings."""
        stripped: str = self._strip_protocol(path)
        marker: str = self._root_marker
        return marker + "/".join(name for name in stripped.split("/") if name)


def _root_marker(protocol: str) -> str:
    # Buckets are reached without the package that fsspec has for them.
    if protocol in BUCKETS:
        return ""
    marker: str = fsspec.get_filesystem_class(protocol).root_marker
    return marker


def _open_storage(
    protocol: str, options: dict[str, Any], stripes: StripeSettings, memory_bytes: int
) -> StripedStorage:
    backend = _open_backend(protocol, options, stripes.deadline_s)
    return StripedStorage(backend, stripes, memory_bytes=memory_bytes)


def _open_backend(protocol: str, options: dict[str, Any], deadline_s: float) -> Backend:
    """The root of the file system that fsspec would open with these options."""
    if protocol in _LOCAL:
        return open_backend("/", deadline_s=deadline_s)
    if protocol == "hdfs":
        host = str(options.get("host", ""))
        user = f"{quote(str(options['user']))}@" if options.get("user") else ""
        port = f":{options['port']}" if options.get("port") else ""
        query = f"?replication={options['replication']}" if options.get("replication") else ""
        return open_backend(f"hdfs://{user}{host}{port}/{query}", deadline_s=deadline_s)
    if protocol in BUCKETS:
        from bootseer.store.buckets.backend import BucketBackend

        return BucketBackend(f"{protocol}://", options, deadline_s=deadline_s)
    from bootseer.store.generic.backend import FsspecBackend

    return FsspecBackend(f"{protocol}://", options)
