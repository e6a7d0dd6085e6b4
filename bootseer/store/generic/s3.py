"""Requests to S3 that s3fs makes with more requests, or without telling what failed.

Each function is given the file system of s3fs, and paths as it writes them ("bucket/key").
Stateless; any thread, but those of fsspec's loop.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_DELETED_AT_ONCE = 1000
"""The most that one request takes (Amazon S3, "DeleteObjects")."""


def is_s3(fs: Any) -> bool:
    """Return whether a file system is that of s3fs."""
    return hasattr(fs, "call_s3") and hasattr(fs, "split_path")


def has_object(fs: Any, path: str) -> bool:
    """Return whether there is an object at `path`, by one request: s3fs also looks for a folder."""
    bucket, key, _ = fs.split_path(path)
    try:
        fs.call_s3("head_object", Bucket=bucket, Key=key, **fs.req_kw)
    except FileNotFoundError:
        return False
    return True


def list_keys(
    fs: Any, folder: str, note_progress: Callable[[], None], *, delimiter: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield one entry for each key below `folder`, as `fs.ls` has them; with the delimiter "/", for
    each name directly in it. `note_progress` is called for each page of a thousand."""
    bucket, key, _ = fs.split_path(folder)
    prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
    more: dict[str, str] = {"Delimiter": delimiter} if delimiter else {}
    while True:
        page = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more, **fs.req_kw)
        note_progress()
        for one in page.get("CommonPrefixes", ()):
            name = f"{bucket}/{one['Prefix'].removesuffix('/')}"
            yield {"name": name, "type": "directory", "size": 0}
        for one in page.get("Contents", ()):
            when = one["LastModified"]
            name = f"{bucket}/{one['Key']}"
            yield {"name": name, "type": "file", "size": one["Size"], "LastModified": when}
        if not page.get("IsTruncated"):
            return
        more["ContinuationToken"] = page["NextContinuationToken"]


def delete_objects(fs: Any, paths: Sequence[str], note_progress: Callable[[], None]) -> None:
    """Delete objects of one bucket, a thousand by one request. Missing ones are no error.

    Raises: PermissionError or OSError for the first that is left.
    """
    for start in range(0, len(paths), _DELETED_AT_ONCE):
        some = paths[start : start + _DELETED_AT_ONCE]
        bucket = fs.split_path(some[0])[0]
        named = {"Objects": [{"Key": fs.split_path(path)[1]} for path in some], "Quiet": True}
        answer = fs.call_s3("delete_objects", Bucket=bucket, Delete=named, **fs.req_kw)
        note_progress()
        for error in answer.get("Errors", ()):
            code, key = error.get("Code", ""), error.get("Key", "")
            kind = PermissionError if code == "AccessDenied" else OSError
            raise kind(f"{bucket}/{key} was not deleted: {code} {error.get('Message', '')}")
