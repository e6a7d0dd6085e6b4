"""Private files and folders: only this user can use them, independent of the umask. Any thread."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bootseer.errors import CorruptError, UnknownFormatError, from_oserror

if TYPE_CHECKING:
    from bootseer.base.documents import DocumentFormat

T = TypeVar("T")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(path: Path) -> None:
    """Make `path` and its missing parents with mode 0700, unless it exists. Raises: OSError.

    `Path.mkdir(parents=True)` would give the mode to the last folder only.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_private_directory(path: Path) -> None:
    """Make `path`, but refuse an existing folder that another user may have filled.

    It must belong to this user, to root, or to the owner of its parent. Raises: PermissionError if
    it does not; OSError.
    """
    make_directory(path)
    # Of a symbolic link, both the link and its target must be trusted.
    for status in (path.lstat(), path.stat()):
        if not _is_trusted(status) and status.st_uid != path.parent.stat().st_uid:
            raise _foreign(path, status)


def open_private_directory(root: Path, names: Sequence[str]) -> int:
    """Return a descriptor of the folder `names` below `root`, which many users may share.

    Missing folders are made with mode 0700; no symbolic link is followed; every folder below `root`
    must be this user's or root's. The caller closes the descriptor. Raises: OSError.
    """
    make_directory(root)
    fd = os.open(root, _DIRECTORY & ~os.O_NOFOLLOW)
    path = root
    for name in names:
        path /= name
        try:
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                pass
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
        status = os.fstat(fd)
        if not _is_trusted(status):
            os.close(fd)
            raise _foreign(path, status)
    return fd


def _foreign(path: Path, status: os.stat_result) -> PermissionError:
    return PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))


def _is_trusted(status: os.stat_result) -> bool:
    return is_own(status) or status.st_uid == 0


def private_directory(path: Path) -> Path:
    """Make `path` by `make_private_directory`, and return it. Raises: BootseerError."""
    try:
        make_private_directory(path)
    except OSError as error:
        raise from_oserror(error, f"make the folder {path}") from error
    return path


def private_opener(path: str, flags: int) -> int:
    """Open a file with mode 0600, following no link; for `open(..., opener=private_opener)`."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_private_file(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data` in one step; make its folder if needed.

    Not synced to disk: for contents that are verified when read, or that may be lost. Raises:
    OSError.
    """
    make_private_directory(path.parent)
    # A random name, since processes of several containers may have the same pid.
    temporary = path.with_name(f".new-{os.urandom(8).hex()}")
    try:
        with open(temporary, "wb", opener=private_opener) as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_private_file(path: Path, form: "DocumentFormat[T]") -> T | None:
    """Return the document at `path`; None if it is missing, unreadable or another user's."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            return form.decode(file.read(form.size_max + 1), str(path))
    except (OSError, CorruptError, UnknownFormatError):
        return None


def is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user, so that its contents may be acted upon."""
    return status.st_uid == os.geteuid()
