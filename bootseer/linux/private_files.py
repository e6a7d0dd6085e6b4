"""Files and folders for this user alone, whatever the umask says. Stateless; any thread."""

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
    """Make `path`, and the parents that are missing, with mode 0700; it may be there already, and
    be anybody's. Raises: OSError.

    `Path.mkdir(parents=True)` gives the mode to the last one only.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_private_directory(path: Path) -> None:
    """As `make_directory`, but one that is there already must be this user's, root's, or belong to
    whom its own folder belongs to: no other user can then have put anything into it.

    Raises: OSError; of a folder of another user PermissionError.
    """
    make_directory(path)
    # Of a link both count: whose it is, and what it leads to.
    for status in (path.lstat(), path.stat()):
        if not _is_trusted(status) and status.st_uid != path.parent.stat().st_uid:
            raise _foreign(path, status)


def open_private_directory(root: Path, names: Sequence[str]) -> int:
    """A descriptor of the folder `names` below `root`, which many users may share. What is missing
    is made, with mode 0700; no symbolic link is followed, and every folder below `root` is this
    user's or root's. The caller closes it. Raises: OSError.
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
    """`path`, made as by `make_private_directory`. Raises: BootseerError."""
    try:
        make_private_directory(path)
    except OSError as error:
        raise from_oserror(error, f"make the folder {path}") from error
    return path


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file gets mode 0600, no link is followed."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def write_private_file(path: Path, data: bytes) -> None:
    """Put `data` there in one step, in place of what is there; the folder is made if need be.

    Not synced: for what is verified whenever it is read, or may be lost. Raises: OSError.
    """
    make_private_directory(path.parent)
    # Random: processes of several containers may have one number.
    temporary = path.with_name(f".new-{os.urandom(8).hex()}")
    try:
        with open(temporary, "wb", opener=private_opener) as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_private_file(path: Path, form: "DocumentFormat[T]") -> T | None:
    """The document at `path`; None where there is none that this release reads, or where it is
    another user's: it must not be acted upon."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            return form.decode(file.read(form.size_max + 1), str(path))
    except (OSError, CorruptError, UnknownFormatError):
        return None


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's, so that what it says may be acted upon."""
    return status.st_uid == os.geteuid()
