"""Files and folders for this user alone, whatever the umask says. Stateless; any thread."""

import os
from pathlib import Path


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


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a new file gets mode 0600, no link is followed."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's, so that what it says may be acted upon."""
    return status.st_uid == os.geteuid()
