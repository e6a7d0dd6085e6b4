"""Folders of tests that other users of this machine may enter."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_of_others() -> Iterator[Path]:
    """Whoever is on this machine may enter it and list it. Not below pytest's, which is made
    private again whenever somebody begins another session."""
    folder = Path(tempfile.mkdtemp(prefix="bootseer-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
