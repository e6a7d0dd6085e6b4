"""Marks that tell a store's folder from the empty mount point of a share that is not mounted.

Each store folder contains a mark file, and each node remembers which marked folders it has used.
Without the mark an unmounted share would look like a new, empty store: objects published there
would be missing for other nodes, and hidden once the share is mounted. The format of both files is
in docs/format/store.md. Stateless; any thread, any process.
"""

import contextlib
import json
import logging
import os
from pathlib import Path

from bootseer.base.short_digest import short_digest
from bootseer.errors import BootseerError, UnavailableError, UnknownFormatError, from_oserror
from bootseer.linux.private_files import write_private_file
from bootseer.store.local.beneath import file_mode, make_directory

logger = logging.getLogger(__name__)

MARK = ".bootseer.store"
_VERSION = 1
_BYTES_MAX = 4096


def is_marked(root: str) -> bool:
    """Return whether the folder is marked as a store."""
    return os.path.lexists(os.path.join(root, MARK))


def mark_store(root: str, memory: Path | None) -> str:
    """Mark the folder `root` as a store, before the first object is published into it.

    `memory` is the folder in which this node remembers stores. Return a message for the user if the
    store is new, else "".

    Raises: UnavailableError if this node has used a store there that is missing now;
    UnknownFormatError if the folder is a store of another version; BootseerError.
    """
    sentence = ""
    _check_version(root)
    if not is_marked(root):
        known = _note_path(root, memory)
        # Check for the mark again: another process may have marked and remembered the folder.
        if known is not None and known.exists() and not is_marked(root):
            raise UnavailableError(
                f"the store {root} was used on this node before, and is missing now: is its share "
                f"mounted? To begin a new store there, remove {known}"
            )
        if not _holds_anything(root):
            sentence = f"a new store begins in {root}: nothing was there"
        _mark(root)
    remember(root, memory)
    return sentence


def remember(root: str, memory: Path | None) -> None:
    """Remember that this node has used the store in `root`, if it is marked. Never raises."""
    known = _note_path(root, memory)
    if known is not None and not known.exists() and is_marked(root):
        with contextlib.suppress(OSError, BootseerError):
            document = {"version": _VERSION, "store": root}
            write_private_file(known, json.dumps(document).encode("ascii"))


def _note_path(root: str, memory: Path | None) -> Path | None:
    return memory and memory / f"{short_digest(os.fsencode(root))[:32]}.json"


def _check_version(root: str) -> None:
    """Raise UnknownFormatError if the mark states another version than this release's."""
    try:
        fd = os.open(os.path.join(root, MARK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            document = json.loads(os.read(fd, _BYTES_MAX))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return  # no mark, or one that a crash has emptied
    version = document.get("version") if isinstance(document, dict) else _VERSION
    if version != _VERSION:
        raise UnknownFormatError(
            f"the store {root} has version {str(version)[:20]}, this release writes {_VERSION}; "
            "use the Bootseer that began the store, or a newer one"
        )


def _holds_anything(root: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        return next(entries, None) is not None
    return False


def _mark(root: str) -> None:
    try:
        os.close(make_directory(root, ()))
        mode = file_mode(root)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileExistsError):
            fd = os.open(os.path.join(root, MARK), flags, 0o600)
            try:
                os.fchmod(fd, mode)
                os.write(fd, json.dumps({"version": _VERSION}).encode("ascii") + b"\n")
            finally:
                os.close(fd)
    except OSError as error:
        raise from_oserror(error, f"begin the store {root}") from error
