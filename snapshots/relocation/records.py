"""What installers wrote down about files: RECORD of wheels, conda-meta of conda packages.

Pure (no I/O). Reads which files packages brought and what conda knows of prefixes in them, and
corrects the hashes of files that relocation changes. What is malformed says nothing, and stays as
it is: it only ever decides about files of the same snapshot.
"""

import base64
import csv
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Set
from typing import Any

from msgspec import Struct

from bootseer.base.documents import parse
from bootseer.errors import CorruptError

_DIGEST = re.compile(r"[a-z0-9]+=[A-Za-z0-9_=-]+")


class Placeholder(Struct, frozen=True):
    """A file in which conda has put the prefix in the place of a longer one."""

    is_binary: bool
    reserved_bytes: int
    """Length of the prefix that the package was built with."""


class Written(Struct, frozen=True):
    """A file that relocation has changed."""

    sha256: bytes
    size_bytes: int


def written(content: bytes) -> Written:
    """What records say about a file of this content."""
    return Written(hashlib.sha256(content).digest(), len(content))


def is_record(path: bytes) -> bool:
    """Whether the file lists what a wheel brought."""
    folder, _, name = path.rpartition(b"/")
    return name == b"RECORD" and folder.endswith(b".dist-info")


def is_conda_record(path: bytes) -> bool:
    """Whether the file describes an installed conda package."""
    return path.startswith(b"conda-meta/") and path.endswith(b".json") and path.count(b"/") == 1


def _listed(line: str) -> list[str]:
    """The three fields of a line of a RECORD; empty where it has not got them."""
    try:
        fields = next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
    return fields if len(fields) == 3 else []


def _path_of(record: bytes, name: str) -> bytes:
    """The path of a listed file, relative to the environment; one outside of it starts with ".."
    or "/"."""
    base = posixpath.dirname(posixpath.dirname(record))
    return posixpath.normpath(posixpath.join(base, name.encode("utf-8", "surrogateescape")))


def files_of_record(record: bytes, data: bytes) -> set[bytes]:
    """The files that the RECORD at the path `record` lists."""
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    return {_path_of(record, fields[0]) for fields in map(_listed, lines) if fields}


def relocated_record(
    record: bytes, data: bytes, changed: Mapping[bytes, Written], removed: Set[bytes]
) -> bytes:
    """The RECORD with the hashes and sizes of `changed` files, and without the lines of
    `removed` ones."""
    lines = []
    for line in data.decode("utf-8", "surrogateescape").splitlines(keepends=True):
        fields = _listed(line)
        path = _path_of(record, fields[0]) if fields else b""
        if fields and path in removed:
            continue
        new = changed.get(path)
        if fields and _DIGEST.fullmatch(fields[1]) and new is not None:
            digest = base64.urlsafe_b64encode(new.sha256).decode().rstrip("=")
            name = line[: line.rindex(fields[1])]  # as it is, with its quotes and comma
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
    """Half a surrogate pair is no byte of a path: it becomes one that no file has."""
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
    """The files that a conda package brought, and those of them that hold the prefix."""
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
    data: bytes, changed: Mapping[bytes, Written], removed: Set[bytes]
) -> bytes:
    """A conda package's description with the hashes of `changed` files, without `removed` ones."""
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
            # Made at installation: nothing else is known of it.
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
