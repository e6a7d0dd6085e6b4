"""How a set-up's paths are found on this host. Light: whatever looks for a Python loads it."""

import os
from pathlib import Path

from msgspec import Struct

from bootseer.linux.root_paths import resolve_in_root


class Place(Struct, frozen=True):
    """How the set-up's paths are found on this host."""

    root: Path
    directory: str
    """The working directory, inside the root."""

    def absolute(self, path: str) -> str:
        return os.path.join(self.directory, path)  # a path of the root, not ours

    def host(self, path: str) -> Path:
        return resolve_in_root(self.root, os.fsencode(self.absolute(path)))
