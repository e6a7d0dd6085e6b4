"""Programs that can have a preloader: checks their records and compares commands with them.

Only this module defines which members a record must have, and mirrors how the kernel starts a
script. Stateless; any thread.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.linux.private_files import is_own, private_opener, write_private_file
from bootseer.served.preload import LAUNCHER
from bootseer.served.preload.record import VERSION, program_words
from bootseer.settings.config import Settings

# Longest first line with "#!" that the kernel reads (execve(2)).
_FIRST_LINE_MAX = 127
_RECORD_BYTES_MAX = 8 << 20
_PROBE_BYTES = 4096


def record_paths(settings: Settings, *, in_image: bool) -> tuple[Path, Path]:
    """Return the paths of the job's import records: of its workers and of its launcher.

    A job in an image has other records: the container's user has written them, and their modules
    are the image's.
    """
    folder = settings.cache_dir / "preload"
    if in_image:
        folder /= "image"
    return folder / f"{settings.job}.json", folder / f"{settings.job}{LAUNCHER}.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of an earlier start; None if there is none that can be used."""
    document = _read(path)
    return document if _is_record(document) else None


def read_refused(record_path: Path) -> bytes:
    """Return the modules that could not be preloaded by a record, as JSON; empty for none."""
    document = _read(record_path.with_suffix(".refused.json"))
    if not isinstance(document, dict) or not all(isinstance(v, str) for v in document.values()):
        return b""
    return json.dumps(document).encode()


def take_record(source: Path, record_path: Path) -> None:
    """Keep the record `source` that a job in a container has written, and what it refused.

    Whoever runs in the container may have written anything. Raises: OSError.
    """
    document = _read(source, of_any_user=True)
    if _is_record(document):
        write_private_file(record_path, json.dumps(document).encode())
    refused = _read(source.with_suffix(".refused.json"), of_any_user=True)
    kept = record_path.with_suffix(".refused.json")
    if isinstance(refused, dict) and all(isinstance(one, str) for one in refused.values()):
        write_private_file(kept, json.dumps(refused).encode())
    else:
        kept.unlink(missing_ok=True)


def _read(path: Path, *, of_any_user: bool = False) -> Any:
    """Return a document; None if there is none, or it is another user's."""
    try:
        with open(path, "rb", opener=_opener) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not (of_any_user or is_own(status)):
                return None
            return json.loads(file.read(_RECORD_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None


def _opener(path: str, flags: int) -> int:
    # A container's user may have made a pipe of this name, for whose writer `open` would wait.
    return private_opener(path, flags | os.O_NONBLOCK)


def _is_record(document: Any) -> bool:
    """Return whether a document is a complete record. It may come from another node."""
    if not isinstance(document, dict) or document.get("version") != VERSION:
        return False
    lists = [document.get(n) for n in ("words", "arguments", "varying", "missing", "modules")]
    tables = [document.get(name) for name in ("extra", "changed")]
    texts = [document.get("executable"), document.get("salt")]
    return (
        all(isinstance(one, list) for one in lists)
        and all(isinstance(one, dict) for one in tables)
        and all(
            isinstance(text, str) and "\0" not in text
            for part in (*lists, *tables, *(one.values() for one in tables if one), texts)
            for text in part or ()
        )
        and bool(document["words"])
        and os.path.isabs(document["executable"])
    )


def is_startable(record: Mapping[str, Any]) -> bool:
    """Return whether the first line of a script can name the record's interpreter."""
    executable = record["executable"]
    line = f"#!{executable} -ISE"
    return (
        len(line) <= _FIRST_LINE_MAX
        and " " not in executable
        and os.access(executable, os.X_OK, effective_ids=True)
    )


def kernel_words(
    record: Mapping[str, Any], command: tuple[str, ...], environ: Mapping[str, str]
) -> list[str]:
    """Return the words by which the kernel starts the command; empty if it is another program."""
    executable = record["executable"]
    words = list(command)
    if words[0] != executable and (script := _script(words[0], executable, environ)):
        words = [executable, script, *words[1:]]
    is_program = words[0] == executable and program_words(words) == record["words"]
    return words if is_program else []


def _script(name: str, executable: str, environ: Mapping[str, str]) -> str:
    """Return the path of the script `name` if its first line names the interpreter, or ""."""
    places = [""] if "/" in name else os.get_exec_path(environ)
    path = next((one for one in (os.path.join(p, name) for p in places) if _can_run(one)), "")
    try:
        with Path(path).open("rb") as file:
            lines = file.read(_PROBE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    # pip and uv use /bin/sh and such a second line if the interpreter's path is too long.
    arguments = '"$0" "$@"'
    of_shell = (f"'''exec' {executable} {arguments}", f"'''exec' \"{executable}\" {arguments}")
    names_interpreter = lines[:1] == [f"#!{executable}"] or (
        lines[:1] == ["#!/bin/sh"] and any(line in of_shell for line in lines[1:2])
    )
    return path if names_interpreter else ""


def _can_run(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
