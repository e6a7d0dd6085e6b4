"""Which folder and name in it a URL of a file means, and the files below it.

Owns the split of such URLs and the walk of a tree. Thread-safe.
"""

import re
from collections.abc import Iterator
from urllib.parse import unquote

from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.store.backend import FileInfo

# Deeper trees are no checkpoints, but a loop of a broken storage.
_MAX_DEPTH = 32
# Whose URLs may end in options; elsewhere "?" is a letter of a name.
_WITH_QUERY = re.compile(r"(hdfs|viewfs|limit\+[a-z0-9+]+)://", re.IGNORECASE)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)


def is_url(text: str) -> bool:
    """Whether `text` names stored files, and not local ones."""
    return "://" in text


def split_url(url: str) -> tuple[str, str]:
    """The URL of the folder that holds what `url` names, and its name there; "" for a root. Pure.

    Options of the URL stay with the folder's. Raises: InvalidInputError.
    """
    bare, mark, query = url.partition("?") if _WITH_QUERY.match(url) else (url, "", "")
    match = _URL.fullmatch(bare)
    if match is None:
        raise InvalidInputError(f"{url!r} is no URL; write for example hdfs://namenode/checkpoints")
    scheme, host, path = match.groups()
    folder, _, name = path.rstrip("/").rpartition("/")
    is_local = scheme.lower().rpartition("+")[2] == "file"
    if is_local:
        # The local backend decodes the folder's part, as RFC 8089 says.
        name = unquote(name, errors="surrogateescape")
    if name in (".", ".."):
        raise InvalidInputError(f"{url!r}: write the path without '.' and '..'")
    return f"{scheme}://{host}/{folder.rstrip('/')}{mark}{query}", name


def files_below(storage: StripedStorage, path: str) -> Iterator[FileInfo]:
    """The stored file at `path`, or every one in the directory there, in order of folders.

    Looks into none of them, so that a damaged one does not hide the rest. Raises: NotFoundError.
    """
    info = storage.backend.stat(path) if path else None
    if info is not None and not info.is_dir:
        yield info
        return
    for folder in folders_below(storage, path):
        for found in storage.tree.stored.entries(folder):
            if not found.is_dir:
                yield found


def folders_below(storage: StripedStorage, path: str, depth: int = _MAX_DEPTH) -> Iterator[str]:
    """The directory `path` and all below it. Raises: InvalidInputError where there is no end."""
    if not depth:
        raise InvalidInputError(f"{storage.backend.url}/{path} is nested too deeply")
    yield path
    infos: list[FileInfo] = [info for info in storage.tree.stored.entries(path) if info.is_dir]
    for info in infos:
        yield from folders_below(storage, info.path, depth - 1)
