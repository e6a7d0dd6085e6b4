"""Files and folders for this user alone, whatever the umask says. Stateless; any thread."""

import os
from pathlib import Path

from bootseer.errors import from_oserror


def make_private_directory(path: Path) -> None:
    """Make `path`, and the parents that are missing, with mode 0700. Raises: OSError.

    `Path.mkdir(parents=True)` gives the mode to the last one only.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_private_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


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


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's, so that what it says may be acted upon."""
    return status.st_uid == os.geteuid()
