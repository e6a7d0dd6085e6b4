"""URLs of storage as people write them, before anything is opened. Pure."""

import re
from pathlib import Path

from bootseer.base.redact import public_url
from bootseer.errors import InvalidInputError

# Of a store or a checkpoint folder; fsspec has more, which nobody writes by hand.
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
_SLIP = (
    rf"(?is)(?P<scheme>(?:limit\+)?(?:{'|'.join(_SCHEMES)}))(?:://?|//|:(?=[^/]*/))"
    r"(?P<rest>.*)"
)


def check_spelling(url: str) -> str:
    """`url`, unless it is nearly a URL ("s3//bucket", "hdfs:/x"): as a bare path it would be a new,
    empty folder in the working directory. Raises: InvalidInputError.
    """
    match = None if "://" in url else re.fullmatch(_SLIP, url)
    if match is not None:
        rest = match["rest"].lstrip("/")
        meant = f"{match['scheme']}://{'/' if match['scheme'] == 'file' else ''}{rest}"
        shown, meant = public_url(url), public_url(meant)
        raise InvalidInputError(
            f"{shown!r} is no URL; is {meant} meant? (a folder of that name is ./{shown})"
        )
    return url


def absolute_url(text: str) -> str:
    """`text`, made absolute where it is a bare path: servers have another working directory.

    Raises: InvalidInputError as `check_spelling`.
    """
    if "://" in text or not text:
        return text
    return str(Path(check_spelling(text)).expanduser().absolute())
