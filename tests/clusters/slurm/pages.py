"""What the pages show, as files of a cluster's users."""

import os
import re
import shutil
from pathlib import Path

from tests.clusters.slurm.cluster import USERS
from tests.support.named_tests import REPOSITORY


def block(page: str, language: str, text: str) -> str:
    """The one block of this language on the page that has this text."""
    written = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", written, re.DOTALL | re.MULTILINE)
    (found,) = [str(one) for one in blocks if text in one]
    return found


def give(path: Path, user: str) -> None:
    """Make it, and all in it, this user's."""
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            shutil.chown(Path(folder, name), USERS[user], USERS[user])
