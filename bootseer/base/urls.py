"""Checks of storage URLs that people wrote, before anything is opened. Pure."""

import re
from pathlib import Path

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError

# Schemes of stores and checkpoint folders. fsspec has more, which nobody writes by hand.
_SCHEMES = (
    "abfs",
    "abfss",
    "adl",
    "arrow_hdfs",
    "az",
    "file",
    "ftp",
    "gcs",
    "gs",
    "hdfs",
    "http",
    "https",
    "memory",
    "oci",
    "oss",
    "s3",
    "s3a",
    "sftp",
    "viewfs",
    "webhdfs",
)
_NEARLY_URL = (
    rf"(?is)(?P<scheme>(?:limit\+)?(?:{'|'.join(_SCHEMES)}))(?:://?|//|:(?=[^/]*/))"
    r"(?P<rest>.*)"
)


def check_spelling(url: str) -> str:
    """Return `url`, or raise InvalidInputError for a misspelt URL ("s3//bucket", "hdfs:/x").

    As a bare path it would name a new, empty folder in the working directory.
    """
    match = None if "://" in url else re.fullmatch(_NEARLY_URL, url)
    if match is not None:
        rest = match["rest"].lstrip("/")
        meant = f"{match['scheme']}://{'/' if match['scheme'] == 'file' else ''}{rest}"
        shown, meant = public_url(url), public_url(meant)
        raise InvalidInputError(
            f"{shown!r} is not a URL; is {meant} meant? (write ./{shown} for a folder)"
        )
    return url


def absolute_url(text: str) -> str:
    """Return `text`, as an absolute path if it is a bare path: servers run in another directory.

    Raises: InvalidInputError, as `check_spelling`.
    """
    if "://" in text or not text:
        return text
    return str(Path(check_spelling(text)).expanduser().absolute())
