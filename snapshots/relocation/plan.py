"""Plans a relocation: which files of an environment are changed, how, and which cannot be.

Pure (no I/O): gets paths and contents, says what becomes of them; `relocation.apply` reads and
writes. The files of an environment fall in four kinds: those that conda has recorded the prefix
of, those in which installers write it, those that a package brought as they are everywhere (never
changed), and all others, which are changed where they are text.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping, Set

from msgspec import Struct

from bootseer.errors import InvalidInputError
from bootseer.snapshots.relocation.contents import Prefix
from bootseer.snapshots.relocation.records import Placeholder
from bootseer.snapshots.targets.paths import text_of

_SCRIPT_DIRECTORIES = (b"bin", b"sbin", b"Scripts", b"condabin")
# Written by pip, uv, venv, virtualenv, conda and the builders of editable installs; relative to
# the environment, or the last name only.
_WRITTEN = re.compile(
    rb"(?:^|.*/)(?:pyvenv\.cfg|[^/]*\.pth|[^/]*\.egg-link|__editable__[^/]*\.py"
    rb"|[^/]*\.dist-info/direct_url\.json)|conda-meta/history|etc/conda/.*"
)


class Brought(Struct, frozen=True):
    """What packages say about their files."""

    by_wheels: Set[bytes]
    by_conda: Mapping[bytes, Placeholder | None]


def is_bytecode(path: bytes) -> bool:
    """Whether a file is compiled Python. It names its source only for tracebacks, which look it up
    by the module's real path, and stays valid as long as the source has its size and time."""
    return path.endswith(b".pyc")


def relocate_file(path: bytes, data: bytes, prefix: Prefix, brought: Brought) -> bytes | None:
    """The new content of a file that holds the old prefix; None: it has to stay as it is.

    Raises: InvalidInputError for a binary that has no room for the new prefix.
    """
    recorded = brought.by_conda.get(path)
    if recorded is not None:
        if not recorded.is_binary:
            return prefix.script(data)
        replaced = prefix.binary(data, recorded.reserved_bytes)
        if replaced is None:
            raise InvalidInputError(
                f"{text_of(path)} has room for a prefix of "
                f"{max(recorded.reserved_bytes, len(prefix.old))} bytes, and "
                f"{text_of(prefix.new)} has {len(prefix.new)}; choose a shorter path"
            )
        return replaced
    if b"\0" in data:
        return None
    is_brought = path in brought.by_wheels or path in brought.by_conda
    if is_brought and not is_written(path):
        # The first line of a script that pip has put elsewhere than in "bin".
        line, end, rest = data.partition(b"\n")
        if not line.startswith(b"#!") or not prefix.is_in(line):
            return None
        changed = prefix.script(line + end) + rest
        return None if prefix.is_in(changed) else changed
    return prefix.script(data)


def is_written(path: bytes) -> bool:
    """Whether installers write the prefix into this file, also where a package lists it."""
    first, slash, _ = path.partition(b"/")
    return bool(slash and first in _SCRIPT_DIRECTORIES) or _WRITTEN.fullmatch(path) is not None


def stale_bytecode(sources: Iterable[bytes], paths: Set[bytes]) -> set[bytes]:
    """The compiled files of changed sources: they would be used although they hold the old
    prefix, where the source has kept its size."""
    stems: dict[bytes, set[bytes]] = {}
    for source in sources:
        folder, _, name = source.rpartition(b"/")
        if name.endswith(b".py"):
            cache = posixpath.join(folder, b"__pycache__")
            stems.setdefault(cache, set()).add(name[:-3])
    if not stems:
        return set()
    return {
        path
        for path in paths
        if is_bytecode(path)
        and posixpath.basename(path).partition(b".")[0] in stems.get(posixpath.dirname(path), ())
    }
