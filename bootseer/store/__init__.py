"""Shared storage behind a URL: a folder, HDFS, a bucket, a registry or any fsspec file system.

`open_store(url)` opens objects under keys, `open_backend(url)` plain files. Each kind of storage is
one `Backend`, imported when a URL needs it; libraries such as hdfs-native load with the first call.
May import `base`, `blob`, `errors`, `settings`, `linux`, `http`, `registry` and `transfer`.
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
"""Variable that names the module which opens `limit+URL`, the slow network that the demo and the
tests simulate. Without the variable such URLs are refused."""

_HDFS_SCHEMES = ("hdfs", "viewfs")


class _Open(Protocol):
    def __call__(self, url: str, *, deadline_s: float | None) -> Backend: ...


def _import_backend(scheme: str) -> _Open:
    """Import the backend of a URL scheme, and return the function that opens it."""
    if scheme.startswith("limit+") and (module := os.environ.get(TEST_NETWORK)):
        opener: _Open = importlib.import_module(module).open_limited
        return opener
    if scheme in ("", "file"):
        from bootseer.store.local.backend import LocalBackend

        return LocalBackend.from_url
    if scheme in _HDFS_SCHEMES:
        from bootseer.store.hdfs.backend import HdfsBackend

        return HdfsBackend
    if scheme == "oci":
        from bootseer.store.oci import OciBackend

        return OciBackend
    if scheme in BUCKETS:
        from bootseer.store.buckets.backend import BucketBackend

        return BucketBackend
    if scheme in ("http", "https"):
        from bootseer.store.web import WebBackend

        return WebBackend
    from bootseer.store.generic import FsspecBackend

    return lambda url, *, deadline_s: FsspecBackend(url, deadline_s=deadline_s)


def open_backend(url: str, *, deadline_s: float | None = None) -> Backend:
    """Return the backend for `url`, without asking a server or creating anything.

    Args:
        url: A bare path, `file://`, `hdfs://`, `oci://` (beside an image in a registry), a bucket
            (`s3://`, `gs://`, `az://`), `https://` (read-only), or any other fsspec URL.
        deadline_s: Longest wait of a call without progress, unless the URL has an option for it.

    Raises: InvalidInputError for a malformed URL.
    """
    if deadline_s is not None:
        check_deadline(deadline_s)
    return _import_backend(split_scheme(url))(url, deadline_s=deadline_s)


def load_backend(url: str) -> None:
    """Import the modules that `open_backend(url)` needs, so that forks share them. Never raises."""
    with contextlib.suppress(BootseerError, ImportError):
        scheme = split_scheme(url)
        _import_backend(scheme)
        if scheme in _HDFS_SCHEMES:
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
    """Return the store at `url`, for a `with` statement; see `open_backend` and `Store`."""
    return Store(open_backend(url, deadline_s=deadline_s), memory=memory, say=say)


def open_own_store(
    settings: Settings,
    say: Callable[[str], None] = logger.info,
    *,
    deadline_s: float | None = None,
) -> Store:
    """Return the store that the settings name, which this node remembers in its cache folder.

    `deadline_s`: the settings' deadline by default.
    """
    return open_store(
        settings.store_url,
        deadline_s=settings.deadline_s if deadline_s is None else deadline_s,
        memory=settings.cache_dir / "stores",
        say=say,
    )
