"""Validation and parsing of storage URLs and of paths below them. Pure."""

import math
import re
from pathlib import Path
from urllib.parse import unquote

from bootseer.base.redact import public_url
from bootseer.base.urls import check_spelling
from bootseer.errors import InvalidInputError

TEMPORARY = ".tmp"
"""Folder of temporary files, and of renewals and successors of leases; hidden from listings."""
# NAME_MAX of every Linux file system, and the default of HDFS
# (dfs.namenode.fs-limits.max-component-length).
NAME_MAX_BYTES = 255
# Below PATH_MAX (4096) and HDFS's limit of 8000 characters.
PATH_MAX_BYTES = 4000

# A scheme of RFC 3986, or with "_": fsspec has a scheme arrow_hdfs.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")


def split_scheme(url: str) -> str:
    """Return the scheme of a URL in lower case; "" for a bare path. Raises: InvalidInputError."""
    match = _SCHEME.match(url)
    # "://" without a scheme before it is a typing error, or a chain of fsspec file systems
    # ("simplecache::s3://..."), not a folder called "simplecache::s3:".
    if not url or "\0" in url or (match is None and "://" in url):
        raise InvalidInputError(
            f"{public_url(url)!r} is not a store URL; write for example file:///mnt/store"
        )
    if match is None:
        check_spelling(url)
        return ""
    return match[1].lower()


def local_root(url: str) -> Path:
    """Return the absolute path that a bare path or a `file://` URL names.

    A URL is percent-decoded, as RFC 8089 says (so `Path.as_uri` round-trips); a bare path is not.

    Raises: InvalidInputError.
    """
    if not split_scheme(url):
        return Path(url).expanduser().absolute()
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidInputError(
            f"{public_url(url)!r} names another host; write file:///absolute/path"
        )
    path = unquote("/" + path, errors="surrogateescape")
    if "\0" in path:
        raise InvalidInputError(f"{public_url(url)!r} contains a NUL byte")
    return Path(path)


def folder_above(url: str) -> str | None:
    """Return the URL of the parent folder of `url`, or None. Raises: InvalidInputError."""
    if split_scheme(url) in ("", "file"):
        root = local_root(url)
        return root.parent.as_uri() if root.parent != root else None
    base, mark, query = url.partition("?")
    scheme, _, rest = base.partition("://")
    above = rest.rstrip("/").rpartition("/")[0]
    # Without a "/" only the server is left, which has no parent.
    return f"{scheme}://{above}{mark}{query}" if "/" in above else None


def split_path(path: str) -> tuple[str, ...]:
    """Return the checked components of a backend path; () for the root "".

    Raises: InvalidInputError for an absolute path, an empty, "." or ".." component, a NUL, text
    that cannot be encoded, or a path that is too long.
    """
    if not path:
        return ()
    try:
        total_bytes = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the path {path!r} is not valid text") from error
    if total_bytes > PATH_MAX_BYTES or "\0" in path:
        raise InvalidInputError(f"the path {path[:80]!r} is longer than 4000 bytes or has a NUL")
    names = tuple(path.split("/"))
    for name in names:
        if name in ("", ".", ".."):
            raise InvalidInputError(
                f"the path {path!r} is not relative and plain: no leading, double or trailing "
                "'/', no '.' and no '..'"
            )
        # A name of at most 63 characters cannot exceed 255 bytes (UTF-8: 4 bytes each at most).
        if len(name) > 63 and len(name.encode("utf-8", "surrogateescape")) > NAME_MAX_BYTES:
            raise InvalidInputError(f"the name {name[:80]!r} is longer than 255 bytes")
    return names


BUCKETS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""Provider of the buckets that each URL scheme names."""


def check_range(offset: int, length: int | None = None) -> None:
    """Raise InvalidInputError for a negative offset or length."""
    if offset < 0 or (length is not None and length < 0):
        raise InvalidInputError(f"the range ({offset}, {length}) is negative")


def check_deadline(deadline_s: float) -> None:
    """Raise InvalidInputError unless the deadline is a positive, finite number of seconds."""
    if not 0 < deadline_s < math.inf:
        raise InvalidInputError(
            f"the deadline {deadline_s} s is not valid; give a number of seconds above 0"
        )
