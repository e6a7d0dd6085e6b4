"""The shared store: `open_store(url)` for keys and objects, `open_backend(url)` for plain files.

Owns the mapping from a URL to a backend. Nothing heavy is imported before a URL asks for it:
fsspec and hdfs-native are loaded by the backends that stand on them.
"""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bootseer.errors import BootseerError
from bootseer.settings.config import Settings
from bootseer.store.backend import Backend, FileInfo, Space, Writer
from bootseer.store.objects.lease import Lease, LeaseWatch
from bootseer.store.objects.store import Store
from bootseer.store.paths import BUCKETS, check_deadline, split_scheme

logger = logging.getLogger(__name__)

__all__ = [
    "Backend",
    "FileInfo",
    "Lease",
    "LeaseWatch",
    "Space",
    "Store",
    "Writer",
    "load_backend",
    "open_backend",
    "open_own_store",
    "open_store",
]


TEST_NETWORK = "BOOTSEER_TEST_NETWORK"
"""The variable that names the module which opens `limit+URL`: a network that the demo and the tests
simulate. Where it is not set there are no such URLs."""

_OF_HDFS_NATIVE = ("hdfs", "viewfs")


class _Open(Protocol):
    def __call__(self, url: str, *, deadline_s: float | None) -> Backend: ...


def _loaded(scheme: str) -> _Open:
    """What opens URLs of a scheme, its module loaded."""
    if scheme.startswith("limit+") and (module := os.environ.get(TEST_NETWORK)):
        opener: _Open = importlib.import_module(module).open_limited
        return opener
    if scheme in ("", "file"):
        from bootseer.store.local.deadline_folder import DeadlineFolder

        return DeadlineFolder.from_url
    if scheme in _OF_HDFS_NATIVE:
        from bootseer.store.hdfs.backend import HdfsBackend

        return HdfsBackend
    if scheme == "oci":
        from bootseer.store.oci.backend import OciBackend

        return OciBackend
    if scheme in BUCKETS:
        from bootseer.store.buckets.backend import BucketBackend

        return BucketBackend
    if scheme in ("http", "https"):
        from bootseer.store.web import WebBackend

        return WebBackend
    from bootseer.store.generic.backend import FsspecBackend

    return lambda url, *, deadline_s: FsspecBackend(url, deadline_s=deadline_s)


def open_backend(url: str, *, deadline_s: float | None = None) -> Backend:
    """The backend for `url`: a bare path, `file://`, `hdfs://`, `oci://` (beside an image in a
    registry), a bucket's, `https://` (only read), or any other fsspec URL.

    Nothing is created and a server is not asked before the first operation. `deadline_s`: no call
    waits longer without progress, where the backend decides and the URL does not say.

    Raises: InvalidInputError for a URL that cannot be used.
    """
    if deadline_s is not None:
        check_deadline(deadline_s)
    return _loaded(split_scheme(url))(url, deadline_s=deadline_s)


def load_backend(url: str) -> None:
    """Load what `open_backend` would, so that the copies of this process have it. Never raises."""
    with contextlib.suppress(BootseerError, ImportError):
        scheme = split_scheme(url)
        _loaded(scheme)
        if scheme in _OF_HDFS_NATIVE:
            # Its first call would load this.
            import hdfs_native  # noqa: F401
        if scheme in BUCKETS:
            import obstore.store  # noqa: F401


def open_store(
    url: str,
    *,
    deadline_s: float | None = None,
    memory: Path | None = None,
    say: Callable[[str], None] = logger.info,
) -> Store:
    """The store at `url`; see `open_backend` and `Store`. Close it, or use it as a context
    manager."""
    return Store(open_backend(url, deadline_s=deadline_s), memory=memory, say=say)


def open_own_store(
    settings: Settings,
    say: Callable[[str], None] = logger.info,
    *,
    deadline_s: float | None = None,
) -> Store:
    """The store of the settings, which this node remembers; as `open_store`. `deadline_s`: by
    default the settings'."""
    return open_store(
        settings.store_url,
        deadline_s=settings.deadline_s if deadline_s is None else deadline_s,
        memory=settings.cache_dir / "stores",
        say=say,
    )
