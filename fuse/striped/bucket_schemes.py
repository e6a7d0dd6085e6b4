"""Schemes of buckets for fsspec, so that `bootseer::s3://bucket/x` needs only `obstore`.

fsspec parses the last URL of a chain with the scheme's own file system (s3fs, gcsfs, adlfs), and
only then calls `CheckpointFileSystem`, which never opens that file system. The entry points of the
schemes name the attributes of this module. An attribute is fsspec's class for the scheme if its
package is installed; else a class that parses URLs, and names the missing package when it is
opened.
"""

import importlib
from typing import Any

from fsspec import AbstractFileSystem

_S3 = ("s3fs", "S3FileSystem")
_GCS = ("gcsfs", "GCSFileSystem")
_AZURE = ("adlfs", "AzureBlobFileSystem")
# fsspec's own table (`fsspec.registry.known_implementations`), which the entry points replace.
_CLASSES = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}


def __getattr__(scheme: str) -> Any:
    """Return the class of fsspec's file system for a scheme."""
    if scheme not in _CLASSES:
        raise AttributeError(scheme)
    package, name = _CLASSES[scheme]
    try:
        return getattr(importlib.import_module(package), name)
    except ImportError as error:
        return _unopenable(scheme, package, error)


def _unopenable(scheme: str, package: str, error: ImportError) -> type:
    """Return a file system class that parses URLs of `scheme` and cannot be opened."""
    reason = (
        f"fsspec opens {scheme}:// by the package {package}, which cannot be loaded ({error}): "
        f"pip install {package} (bootseer::{scheme}:// does not need it)"
    )

    class Unopened(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = scheme

        def __init__(self, *arguments: Any, **options: Any) -> None:
            raise ImportError(reason)

    return Unopened
