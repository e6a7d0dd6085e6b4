"""Letting other users into a test's folders, which pytest makes private."""

import stat
from pathlib import Path


def let_others_in(folder: Path) -> None:
    """Whoever is on this machine may enter `folder` and list it, and walk down to it."""
    folder.chmod(0o755)
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(stat.S_IMODE(mode) | 0o055)
