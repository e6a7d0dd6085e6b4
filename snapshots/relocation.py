"""Relocation: an environment changed so that it works at another prefix.

Three parts: the change of a file's bytes (`Prefix`), the records of installers (RECORD of wheels,
conda-meta), and the change of a staged tree (`relocate`). The first two are pure. An environment
has four kinds of files: files for which conda recorded the prefix, files in which installers write
it, files that a package brought unchanged (never changed here), and all others, which are changed
if they are text. Files are changed in place: owner, mode, time, links and attributes stay. No other
process sees the staged tree, and after a failure all of it is removed.
"""

import base64
import contextlib
import csv
import hashlib
import json
import mmap
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from bootseer.base.documents import parse
from bootseer.blob.tree import Tree
from bootseer.errors import AlreadyExistsError, CorruptError, InvalidInputError, from_oserror
from bootseer.settings.config import Settings
from bootseer.snapshots.fetch import fetch_tree
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.scan import base_digest, scan, text_of
from bootseer.snapshots.staging import Placed, Restoration, one_directory, put_in_place
from bootseer.store import Store

# Linux before 5.1 reads 128 bytes of a script, its line end included (BINPRM_BUF_SIZE); pip and
# conda have the same limit.
_SHEBANG_BYTES_MAX = 127
# Characters that need no quotes in shells, csh, fish, Python and `#!` lines: the text around the
# old prefix may have no quotes.
_PLAIN = re.compile(r"/[A-Za-z0-9_/.+@=~-]*")
# Bytes that continue a name. A dot continues it if a name follows; else it ends a sentence.
_NAME = rb"A-Za-z0-9_\x80-\xff"
_BEHIND = rb"(?![" + _NAME + rb"+~@-]|\.[" + _NAME + rb"])"
# "/data/opt/env" does not contain the prefix "/opt/env", nor "/usr/bin/env" the prefix "/env";
# "-L/opt/env/lib" contains "/opt/env".
_BEFORE = rb"(?:(?<=-[BFILR])|(?<=-isystem)|(?<![" + _NAME + rb".+~@-]))"
_PYTHON = re.compile(rb"(python|pypy)[0-9.]*t?")


class Prefix(Struct, frozen=True, dict=True):
    """Old and new path of an environment: absolute, without a slash at the end."""

    old: bytes
    new: bytes

    @cached_property
    def forms(self) -> dict[bytes, bytes]:
        """Old prefix -> new prefix, in each form that occurs in files: plain, in URLs, in JSON."""
        found = {}
        for write in (quote, lambda text: json.dumps(text)[1:-1], lambda text: text):
            old, new = (
                write(path.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
                for path in (self.old, self.new)
            )
            found[old] = new
        return found

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        forms = b"|".join(re.escape(form) for form in self.forms)
        return re.compile(_BEFORE + b"(" + forms + b")" + _BEHIND)

    def is_in(self, data: bytes) -> bool:
        """Return whether `data` contains the old prefix, not as a part of another path."""
        return self._pattern.search(data) is not None

    def text(self, data: bytes) -> bytes:
        """Return a text with the new prefix."""
        return self._pattern.sub(lambda match: self.forms[match[1]], data)

    def binary(self, data: bytes, reserved_bytes: int) -> bytes | None:
        """Return a binary of the same size with the new prefix; None if there is no room.

        `reserved_bytes` is the length of the prefix with which the binary was built: the installer
        replaced it by a shorter one and filled the rest of the string with NULs.
        """
        one = re.compile(_BEFORE + re.escape(self.old) + _BEHIND)
        pieces = []
        position = 0
        while (match := one.search(data, position)) is not None:
            start = match.start()
            end = data.find(b"\0", start)
            end = len(data) if end < 0 else end
            replaced, count = one.subn(lambda _: self.new, data[start:end])
            spare = count * max(reserved_bytes - len(self.old), 0)
            filling = data[end + 1 : end + 1 + spare]
            # The NULs that are there may be used, except the last one, which ends the string.
            end += len(filling) - len(filling.lstrip(b"\0"))
            if len(replaced) > end - start:
                return None
            pieces += [data[position:start], replaced.ljust(end - start, b"\0")]
            position = end
        pieces.append(data[position:])
        return b"".join(pieces)

    def script(self, data: bytes) -> bytes:
        """Return a text with the new prefix whose first line still names an interpreter.

        If the line would be too long for the kernel, a shell starts Python, as in scripts of pip,
        and `env` finds any other interpreter.
        """
        changed = self.text(data)
        line, _, rest = changed.partition(b"\n")
        words = line[2:].split(None, 1)
        if (
            not line.startswith(b"#!")
            or not words
            or len(line) < _SHEBANG_BYTES_MAX
            or data.startswith(line + b"\n")
        ):
            return changed
        program, options = words[0], words[1:]
        if _PYTHON.fullmatch(posixpath.basename(program)):
            # The line is a string for Python and a command for the shell.
            command = b" ".join([b"'''exec'", program, *options, b'"$0" "$@"'])
            return b"#!/bin/sh\n" + command + b"\n' '''\n" + rest
        found = [b"-S", posixpath.basename(program), *options]
        return b"#!/usr/bin/env " + b" ".join(found if options else found[1:]) + b"\n" + rest

    def link(self, path: bytes, target: bytes) -> bytes:
        """Return the target of a symbolic link at `path`, relative to the prefix.

        It leads to the same place as before, inside or outside the prefix.
        """
        if target == self.old or target.startswith(self.old + b"/"):
            return self.new + target[len(self.old) :]
        if target.startswith(b"/"):
            return target
        folder = posixpath.dirname(path)
        if not posixpath.normpath(posixpath.join(folder, target)).startswith(b".."):
            return target
        meant = posixpath.normpath(posixpath.join(self.old, folder, target))
        if meant == self.old or meant.startswith(self.old + b"/"):
            meant = self.new + meant[len(self.old) :]
        return posixpath.relpath(meant, posixpath.join(self.new, folder))


def prefix_of(old: bytes, new: str) -> Prefix:
    """Return the prefixes. Raises: InvalidInputError if `new` needs quotes in scripts."""
    if not _PLAIN.fullmatch(new) or new == "/":
        raise InvalidInputError(
            f"an environment cannot be moved to {new!r}: its scripts cannot name it; use a path of "
            "letters, digits and '/', '.', '_', '-', '+', '@', '=', '~' only"
        )
    return Prefix(old, new.encode("utf-8", "surrogateescape"))


_DIGEST = re.compile(r"[a-z0-9]+=[A-Za-z0-9_=-]+")


class Placeholder(Struct, frozen=True):
    """File in which conda replaced a longer prefix by that of the environment."""

    is_binary: bool
    reserved_bytes: int
    """Length of the prefix with which the package was built."""


class _NewContent(Struct, frozen=True):
    """New digest and size of a changed file."""

    sha256: bytes
    size_bytes: int


def new_content_of(content: bytes) -> _NewContent:
    """Return digest and size of the new content of a file."""
    return _NewContent(hashlib.sha256(content).digest(), len(content))


def _is_record(path: bytes) -> bool:
    """Return whether the file lists the files of a wheel."""
    folder, _, name = path.rpartition(b"/")
    return name == b"RECORD" and folder.endswith(b".dist-info")


def _is_conda_record(path: bytes) -> bool:
    """Return whether the file describes an installed conda package."""
    return path.startswith(b"conda-meta/") and path.endswith(b".json") and path.count(b"/") == 1


def _listed(line: str) -> list[str]:
    """Return the three fields of a line of a RECORD; empty for other lines."""
    try:
        fields = next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
    return fields if len(fields) == 3 else []


def _path_of(record: bytes, name: str) -> bytes:
    """Return the path of a listed file, relative to the environment.

    A path outside of the environment starts with ".." or "/".
    """
    base = posixpath.dirname(posixpath.dirname(record))
    return posixpath.normpath(posixpath.join(base, name.encode("utf-8", "surrogateescape")))


def _files_of_record(record: bytes, data: bytes) -> set[bytes]:
    """Return the files that the RECORD at the path `record` lists."""
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    return {_path_of(record, fields[0]) for fields in map(_listed, lines) if fields}


def relocated_record(
    record: bytes, data: bytes, changed: Mapping[bytes, _NewContent], removed: Set[bytes]
) -> bytes:
    """Return the RECORD with new hashes of `changed` files, without the `removed` ones."""
    lines = []
    for line in data.decode("utf-8", "surrogateescape").splitlines(keepends=True):
        fields = _listed(line)
        path = _path_of(record, fields[0]) if fields else b""
        if fields and path in removed:
            continue
        new = changed.get(path)
        if fields and _DIGEST.fullmatch(fields[1]) and new is not None:
            digest = base64.urlsafe_b64encode(new.sha256).decode().rstrip("=")
            name = line[: line.rindex(fields[1])]  # unchanged, with quotes and comma
            line_end = line[len(line.rstrip("\r\n")) :]
            line = f"{name}sha256={digest},{new.size_bytes}{line_end}"
        lines.append(line)
    return "".join(lines).encode("utf-8", "surrogateescape")


def _paths(document: Any) -> list[dict[str, Any]]:
    try:
        paths = document["paths_data"]["paths"]
        return [entry for entry in paths if isinstance(entry["_path"], str)]
    except (KeyError, TypeError):
        return []


def _path_bytes(entry: Mapping[str, Any]) -> bytes:
    """Return the path of an entry; for half a surrogate pair, a path that no file has."""
    try:
        return str(entry["_path"]).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return b"\0"


def _decoded(data: bytes) -> Any:
    try:
        return parse(data, "a record of conda", len(data))
    except CorruptError:
        return None


def placeholders_of(data: bytes) -> dict[bytes, Placeholder | None]:
    """Return the files of a conda package; a `Placeholder` for those that contain the prefix."""
    found: dict[bytes, Placeholder | None] = {}
    for entry in _paths(_decoded(data)):
        built = entry.get("prefix_placeholder")
        found[_path_bytes(entry)] = (
            Placeholder(entry.get("file_mode") == "binary", len(built.encode("utf-8", "replace")))
            if isinstance(built, str) and built
            else None
        )
    return found


def relocated_conda_record(
    data: bytes, changed: Mapping[bytes, _NewContent], removed: Set[bytes]
) -> bytes:
    """Return a conda package's record with hashes of `changed` files, without `removed` ones."""
    document = _decoded(data)
    is_changed = False
    for entry in _paths(document):
        new = changed.get(_path_bytes(entry))
        if new is None:
            continue
        is_changed = True
        if "sha256_in_prefix" in entry:
            entry["sha256_in_prefix"] = new.sha256.hex()
        elif entry.get("path_type") == "unix_python_entry_point":
            # A script that conda made at installation, so there is only one hash.
            entry["sha256"] = new.sha256.hex()
            entry["size_in_bytes"] = new.size_bytes
    gone = {path.decode("utf-8", "surrogateescape") for path in removed}
    if any(entry["_path"] in gone for entry in _paths(document)):
        kept = [entry for entry in _paths(document) if entry["_path"] not in gone]
        document["paths_data"]["paths"] = kept
        if isinstance(document.get("files"), list):
            document["files"] = [path for path in document["files"] if path not in gone]
        is_changed = True
    return json.dumps(document, indent=2).encode("ascii") if is_changed else data


_SCRIPT_DIRECTORIES = (b"bin", b"sbin", b"Scripts", b"condabin")
# Files that pip, uv, venv, virtualenv, conda and builders of editable installs write; paths
# relative to the environment, or last names.
_WRITTEN_BY_INSTALLERS = re.compile(
    rb"(?:^|.*/)(?:pyvenv\.cfg|[^/]*\.pth|[^/]*\.egg-link|__editable__[^/]*\.py"
    rb"|[^/]*\.dist-info/direct_url\.json)|conda-meta/history|etc/conda/.*"
)


class Brought(Struct, frozen=True):
    """Files that packages list, and so brought to the environment."""

    by_wheels: Set[bytes]
    by_conda: Mapping[bytes, Placeholder | None]


def _is_bytecode(path: bytes) -> bool:
    """Return whether a file is compiled Python.

    Bytecode contains its source's path only for tracebacks, which use the module's real path. It
    is valid while size and time of the source are unchanged.
    """
    return path.endswith(b".pyc")


def relocate_file(path: bytes, data: bytes, prefix: Prefix, brought: Brought) -> bytes | None:
    """Return the new content of a file that contains the old prefix; None if it must not change.

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
    if is_brought and not _is_written_by_installers(path):
        # Only the first line, of a script that pip installed elsewhere than in "bin".
        line, end, rest = data.partition(b"\n")
        if not line.startswith(b"#!") or not prefix.is_in(line):
            return None
        changed = prefix.script(line + end) + rest
        return None if prefix.is_in(changed) else changed
    return prefix.script(data)


def _is_written_by_installers(path: bytes) -> bool:
    """Return whether installers write the prefix into this file, though a package may list it."""
    first, slash, _ = path.partition(b"/")
    return (
        bool(slash and first in _SCRIPT_DIRECTORIES)
        or _WRITTEN_BY_INSTALLERS.fullmatch(path) is not None
    )


def stale_bytecode(sources: Iterable[bytes], paths: Set[bytes]) -> set[bytes]:
    """Return the compiled files of changed sources.

    They contain the old prefix, and are used if the size of the source is unchanged.
    """
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
        if _is_bytecode(path)
        and posixpath.basename(path).partition(b".")[0] in stems.get(posixpath.dirname(path), ())
    }


_CAPABILITY = "security.capability"
_SHOWN_COUNT = 10
# Limits for files that are read into memory: texts that installers write, and binaries with a
# prefix, are smaller.
_TEXT_BYTES_MAX = 64 * 1024 * 1024
_BINARY_BYTES_MAX = 4 * 1024 * 1024 * 1024


class Relocation(Struct, frozen=True):
    """Result of a relocation."""

    changed: tuple[bytes, ...]
    """Changed files and links, relative to the environment."""
    removed: tuple[bytes, ...]
    """Removed bytecode of changed sources."""
    left: tuple[bytes, ...]
    """Files that still contain the old prefix."""

    def sentences(self, prefix: Prefix) -> Iterator[str]:
        """Yield sentences for people about the changed files."""
        old = text_of(prefix.old)
        yield f"relocated from {old}: {len(self.changed)} files and links changed"
        if self.left:
            shown = ", ".join(text_of(path) for path in self.left[:_SHOWN_COUNT])
            more = len(self.left) - _SHOWN_COUNT
            yield (
                f"warning: {old} is named in files that were left as they are, since a package "
                f"brought them so or they are binary: {shown}"
                + (f" and {more} more" if more > 0 else "")
            )


def restore_relocated(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    path: Path,
    report: Callable[[str], None],
) -> None:
    """Restore an environment at another path, changed so that it works there.

    The caller holds the lock of `path`.

    Raises: as `put_in_place`; AlreadyExistsError; InvalidInputError if it cannot work there.
    """
    target = one_directory(manifest)
    prefix = prefix_of(target.path, os.fsdecode(path))
    _check_free(path)

    def fill(target: Target, tree: Tree, directory: Path) -> str:
        fetch_tree(store, target, tree, directory, settings.deadline_s)
        for sentence in relocate(tree, directory, prefix).sentences(prefix):
            report(sentence)
        return ""

    work = Restoration(
        settings, store, manifest, [Placed(target, path)], {target.path: base_digest({})}
    )
    # The target does not hold the snapshot unchanged, so nothing is recorded.
    put_in_place(work, fill, on_finished=lambda target, fingerprint, base, tree_fingerprint: None)


def _check_free(path: Path) -> None:
    if os.path.islink(path):
        raise AlreadyExistsError(f"{path} is a symbolic link; name the directory itself")
    for folder in (path, *path.parents):
        # These follow links, and return False for folders that this user may not search.
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise AlreadyExistsError(f"{folder} exists and is not a directory")
    if base_digest(scan(path)) != base_digest({}):
        raise AlreadyExistsError(f"{path} is not empty; choose another directory")


def relocate(tree: Tree, directory: Path, prefix: Prefix) -> Relocation:
    """Turn a tree that was extracted to `directory` into an environment at the new prefix.

    Raises: InvalidInputError for a file without room for the prefix; BootseerError.
    """
    try:
        return _relocate(tree, os.fsencode(directory), prefix)
    except OSError as error:
        raise from_oserror(error, f"relocate the environment staged in {directory}") from error


def _relocate(tree: Tree, top: bytes, prefix: Prefix) -> Relocation:
    files: dict[int, list[bytes]] = {}
    links: list[tuple[bytes, bytes]] = []
    for path, number in tree.walk():
        mode = tree.mode(number)
        if stat.S_ISREG(mode):
            files.setdefault(number, []).append(path)
        elif stat.S_ISLNK(mode):
            links.append((path, tree.link_target(number)))
    sizes = tree.columns.size_bytes
    readable = sorted(
        path
        for number, names in files.items()
        if sizes[number] <= _TEXT_BYTES_MAX
        for path in names
    )
    records = [path for path in readable if _is_record(path)]
    conda_records = [path for path in readable if _is_conda_record(path)]
    brought = Brought(
        {file for path in records for file in _files_of_record(path, _read(top, path))},
        {
            file: placeholder
            for path in conda_records
            for file, placeholder in placeholders_of(_read(top, path)).items()
        },
    )
    all_records = {*records, *conda_records}
    others = [names for names in files.values() if all_records.isdisjoint(names)]
    changed, left = _relocate_files(top, others, prefix, brought)
    removed = stale_bytecode(changed, {path for names in files.values() for path in names})
    # Records of wheels list the files above; records of conda list those of wheels as well.
    for path in (*records, *conda_records):
        data = _read(top, path)
        text = prefix.text(data)
        if _is_record(path):
            new = relocated_record(path, text, changed, removed)
        else:
            new = relocated_conda_record(text, changed, removed)
        if new != data:
            _rewrite(top + b"/" + path, new)
            changed[path] = new_content_of(new)
    with _directory_times(top) as touch:
        for path in removed:
            touch(path)
            os.unlink(top + b"/" + path)
        moved = []
        for path, target in links:
            new_target = prefix.link(path, target)
            if new_target != target:
                touch(path)
                _relink(top + b"/" + path, new_target)
                moved.append(path)
    return Relocation(
        tuple(sorted([*changed, *moved])), tuple(sorted(removed)), tuple(sorted(left))
    )


def _relocate_files(
    top: bytes, files: Iterable[list[bytes]], prefix: Prefix, brought: Brought
) -> tuple[dict[bytes, _NewContent], list[bytes]]:
    """Change the files that contain the old prefix; return them, and the files left as they are.

    `files`: the names of each file.
    """
    changed: dict[bytes, _NewContent] = {}
    left: list[bytes] = []
    needles = list(prefix.forms)
    for names in files:
        if _is_bytecode(names[0]):
            continue
        size_bytes = _size_with(top + b"/" + names[0], needles)
        if not size_bytes:
            continue
        # A package lists one name of a hard link.
        known = next((name for name in names if brought.by_conda.get(name)), names[0])
        limit_bytes = _BINARY_BYTES_MAX if brought.by_conda.get(known) else _TEXT_BYTES_MAX
        if size_bytes > limit_bytes:
            left.append(known)
            continue
        data = _read(top, known)
        new = relocate_file(known, data, prefix, brought)
        if new is None and prefix.is_in(data):
            left.append(known)
        elif new is not None and new != data:
            _rewrite(top + b"/" + known, new)
            changed.update(dict.fromkeys(names, new_content_of(new)))
    return changed, left


def _read(top: bytes, path: bytes) -> bytes:
    return Path(os.fsdecode(top + b"/" + path)).read_bytes()


def _size_with(path: bytes, needles: list[bytes]) -> int:
    """Return the size of a file that contains one of `needles`; 0 if it contains none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return 0  # only root can read the file, here and in a job
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes < min(map(len, needles)):
            return 0
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as data:
            return size_bytes if any(data.find(needle) >= 0 for needle in needles) else 0
    finally:
        os.close(fd)


def _rewrite(path: bytes, content: bytes) -> None:
    """Replace the content of a file; all its attributes stay."""
    before = os.lstat(path)
    capability = None
    with contextlib.suppress(OSError):
        capability = os.getxattr(path, _CAPABILITY, follow_symlinks=False)
    if not before.st_mode & stat.S_IWUSR:
        os.chmod(path, stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]
        # Writing removes set-user-ID bits and capabilities.
        os.fchmod(fd, stat.S_IMODE(before.st_mode))
        if capability is not None:
            os.setxattr(fd, _CAPABILITY, capability)
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(fd)


def _relink(path: bytes, target: bytes) -> None:
    """Replace the target of a symbolic link; owner and time stay."""
    before = os.lstat(path)
    os.unlink(path)
    os.symlink(target, path)
    if os.geteuid() == 0:
        os.lchown(path, before.st_uid, before.st_gid)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns), follow_symlinks=False)


@contextlib.contextmanager
def _directory_times(top: bytes) -> Iterator[Callable[[bytes], None]]:
    """Yield a function to call with each path before its directory is changed.

    At the end, directories get their modes and times back.
    """
    before: dict[bytes, os.stat_result] = {}

    def touch(path: bytes) -> None:
        folder = os.path.dirname(top + b"/" + path)
        if folder not in before:
            before[folder] = os.lstat(folder)
            os.chmod(folder, stat.S_IMODE(before[folder].st_mode) | stat.S_IRWXU)

    try:
        yield touch
    finally:
        _put_back(before)


def _put_back(before: Mapping[bytes, os.stat_result]) -> None:
    for folder, status in before.items():
        os.chmod(folder, stat.S_IMODE(status.st_mode))
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
