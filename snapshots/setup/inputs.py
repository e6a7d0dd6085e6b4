"""Digests of the files that a set-up reads: what the user declared, and what the command names.

Alone owns reading input files. Follows `-r`, `-c` and `--find-links` lines of requirement files, as
pip does; credentials in URLs of such files do not count.
Nothing here runs anything. Paths are the job's: relative ones start at its working directory and
all are resolved inside its root.
"""

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct, field

from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.redact import without_users
from bootseer.rooted import resolve_in_root
from bootseer.snapshots.setup.command import Hints
from bootseer.snapshots.setup.fingerprint import Part

# Of files that nobody declared: a word of the command may happen to name a data set.
_GUESSED_BYTES_MAX = 256 * 1024 * 1024
_GUESSED_FILES_MAX = 20_000
_REQUIREMENTS_BYTES_MAX = 16 * 1024 * 1024
_READ_BYTES = 1024 * 1024
# A wheel ends with its directory, and that with the checksum of RECORD, which has the digests of
# all files in it; a tar.gz ends with its own. Nobody reads gigabytes of wheels at every start.
_END_BYTES = 16 * 1024
# In a source tree these change by themselves.
_IGNORED = {".git", "__pycache__", ".venv", "build", "dist", ".tox", ".mypy_cache", ".ruff_cache"}
# Variables with files, separated by blanks, which pip and uv read like those that options name.
FILE_VARIABLES = (
    "PIP_REQUIREMENT",
    "PIP_CONSTRAINT",
    "PIP_BUILD_CONSTRAINT",
    "UV_CONSTRAINT",
    "UV_BUILD_CONSTRAINT",
    "UV_OVERRIDE",
)
_INCLUDE = re.compile(
    r"\s*(?:-r|--requirement|-c|--constraint)(?:\s+|=|(?<=-[rc]))(?P<file>[^\s#]+)"
)
_LINKS = re.compile(r"\s*(?:-f|--find-links)(?:\s+|=|(?<=-f))(?P<place>[^\s#]+)")
_REQUIREMENTS = (".txt", ".in", ".pip")
# A project or an archive on this host: "-e ./project[extra]", "name @ file:///wheel".
_LOCAL = re.compile(
    r"\s*(?:(?:-e|--editable)(?:\s+|=))?(?:[\w.,\[\]-]+\s*@\s*)?"
    r"(?P<path>file:///[^\s;#\[]+|\.{0,2}/[^\s;#\[]*|\.)"
)
_EXTRAS = re.compile(r"\[[\w.,\s-]*\]$")


class Place(Struct, frozen=True):
    """How the set-up's paths are found on this host."""

    root: Path
    directory: str
    """The working directory, inside the root."""

    def absolute(self, path: str) -> str:
        return os.path.join(self.directory, path)  # a path of the root, not ours

    def host(self, path: str) -> Path:
        return resolve_in_root(self.root, os.fsencode(self.absolute(path)))


class _Collected(Struct, dict=True):
    place: Place
    outputs: tuple[bytes, ...]
    parts: dict[str, Part] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    """Inputs that nobody declared."""
    has_directory: bool = False


def collect_inputs(
    place: Place, declared: Iterable[str], hints: Hints, outputs: Sequence[bytes]
) -> tuple[list[Part], list[str]]:
    """Parts for every input file, and the names of those found without being declared.

    What lies in `outputs`, the targets, is an input only when it is declared.

    Raises: NotFoundError for a declared file that is missing, or another error of reading it.
    A file that the command only seems to name is left out when it does not exist.
    """
    collected = _Collected(place, tuple(outputs))
    for name in declared:
        _add(collected, name, is_declared=True)
    for name in hints.files:
        _add(collected, _requirement_path(name), is_declared=False)
    for name in hints.link_dirs:
        _add_links(collected, name)
    parts = sorted(collected.parts.values())
    if collected.has_directory:
        # A project that is installed from its source may record where that lies.
        parts.append(Part("directory", place.directory))
    return parts, collected.found


def _add(collected: _Collected, name: str, *, is_declared: bool) -> None:
    if name in collected.parts or "://" in name or "\0" in name:
        return
    if not is_declared and _is_output(collected, name):
        return
    try:
        path = collected.place.host(name)
        mode = path.stat().st_mode
    except (OSError, InvalidInputError) as error:
        if is_declared:
            raise NotFoundError(f"the input {name} cannot be read: {error}") from error
        return
    try:
        if stat.S_ISDIR(mode):
            without = {str(resolve_in_root(collected.place.root, one)) for one in collected.outputs}
            value = _tree_digest(path, without, limited=not is_declared)
            collected.has_directory |= value is not None
        elif stat.S_ISREG(mode):
            if not is_declared and path.stat().st_size > _GUESSED_BYTES_MAX:
                return
            value = _requirements_digest(path) if name.endswith(_REQUIREMENTS) else None
            value = value or _file_digest(path)
        else:
            return
    except OSError as error:
        if is_declared:
            raise from_oserror(error, f"read the input {name}") from error
        return
    if value is None:
        return
    collected.parts[name] = Part(f"input {name}", value)
    if not is_declared:
        collected.found.append(name)
    if stat.S_ISREG(mode) and name.endswith(_REQUIREMENTS):
        _follow(collected, name, path)


def _is_output(collected: _Collected, name: str) -> bool:
    path = os.fsencode(os.path.normpath(collected.place.absolute(name)))
    return any((path + b"/").startswith(output + b"/") for output in collected.outputs)


def _follow(collected: _Collected, name: str, path: Path) -> None:
    """Adds what a requirements file includes. Any text file may pass here: no errors."""
    try:
        if path.stat().st_size > _REQUIREMENTS_BYTES_MAX:
            return
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    directory = name.rpartition("/")[0]
    for line in text.replace("\\\n", " ").splitlines():
        if match := _INCLUDE.match(line):
            # pip takes these relative to the including file,
            included = match["file"]
            relative = f"{directory}/{included}" if directory else included
            _add(collected, included if included.startswith("/") else relative, is_declared=False)
        elif match := _LINKS.match(line):
            # also these if it is there, else from the working directory,
            found = _local_path(match["place"])
            if directory and not found.startswith("/"):
                relative = f"{directory}/{found}"
                found = relative if _exists(collected, relative) else found
            _add_links(collected, found)
        elif match := _LOCAL.match(line):
            # and local projects relative to the working directory.
            _add(collected, _local_path(match["path"]), is_declared=False)


def _exists(collected: _Collected, name: str) -> bool:
    try:
        return collected.place.host(name).exists()
    except (OSError, InvalidInputError):
        return False


def _local_path(text: str) -> str:
    """A place of wheels as a path, also where it is a file URL."""
    return unquote(text.removeprefix("file://")) if text.startswith("file:///") else text


def _requirement_path(word: str) -> str:
    """The path in a requirement of a command line, if it is one of this host; else any text."""
    if "file:///" in word:
        word = _local_path(word[word.index("file:///") :].partition("#")[0])
    return _EXTRAS.sub("", word)


def _requirements_digest(path: Path) -> str | None:
    """Without credentials in URLs, which change more often than what an index serves; None for a
    file that has none."""
    if path.stat().st_size > _REQUIREMENTS_BYTES_MAX:
        return None
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    public = without_users(text)
    if public == text:
        return None
    data = public.encode("utf-8", "surrogateescape")
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return "sha256:" + digest.hexdigest()


def _tree_digest(top: Path, without: Collection[str], *, limited: bool) -> str | None:
    """Over names, modes and contents, but for the folders `without`, which the set-up makes; None
    for a guessed directory that is too large to be one."""
    digest = hashlib.sha256()
    files = 0
    size_bytes = 0
    for directory, folders, names in os.walk(top):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _IGNORED
            and not name.endswith(".egg-info")
            and os.path.join(directory, name) not in without
        )
        for name in sorted(names):
            if name.endswith(".pyc"):
                continue
            path = Path(directory, name)
            info = path.lstat()
            files += 1
            size_bytes += info.st_size
            if limited and (files > _GUESSED_FILES_MAX or size_bytes > _GUESSED_BYTES_MAX):
                return None
            relative = os.fsencode(path.relative_to(top))
            if stat.S_ISREG(info.st_mode):
                content = _file_digest(path)
            elif stat.S_ISLNK(info.st_mode):
                content = "link " + os.readlink(path)
            else:
                continue
            data = os.fsencode(content)
            mode = info.st_mode & 0o111
            digest.update(b"%d:%b,%d,%d:%b," % (len(relative), relative, mode, len(data), data))
    return "sha256:" + digest.hexdigest()


def _add_links(collected: _Collected, name: str) -> None:
    """A folder of wheels: names, sizes and ends, which tell a build from another of its version."""
    name = _local_path(name)
    if "://" in name or "\0" in name or name in collected.parts:
        return
    digest = hashlib.sha256()
    try:
        path = collected.place.host(name)
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_file():
                line = os.fsencode(entry.name)
                end = _end(Path(entry.path))
                size = entry.stat().st_size
                digest.update(b"%d:%b,%d,%d:%b," % (len(line), line, size, len(end), end))
    except (OSError, InvalidInputError):
        return  # pip says what is wrong with it
    collected.parts[name] = Part(f"wheels {name}", "sha256:" + digest.hexdigest())
    collected.found.append(name)


def _end(path: Path) -> bytes:
    """The last bytes of a file; of one that cannot be read, none."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return file.read(_END_BYTES)
    except OSError:
        return b""


def check_declared(names: Iterable[str]) -> None:
    """Raises: InvalidInputError for a name that no file can have."""
    for name in names:
        if not name or "\0" in name:
            raise InvalidInputError(f"{name!r} is not the name of an input file")
