"""The programs that preloaders can be begun for: their records, read and checked, and whether a
command is such a program.

Alone decides what a record must have, and how the kernel starts a script. Stateless; any thread.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.linux.private_files import is_own, private_opener
from bootseer.served.preload import LAUNCHER
from bootseer.served.preload.record import VERSION, program_words
from bootseer.settings.config import Settings

# execve(2): of a first line "#!" the kernel reads so much.
_FIRST_LINE_MAX = 127
_RECORD_BYTES_MAX = 8 << 20
_LOOK_BYTES = 4096


def record_paths(settings: Settings) -> tuple[Path, Path]:
    """Where a worker of the job writes what it has imported, and where its launcher does."""
    folder = settings.cache_dir / "preload"
    return folder / f"{settings.job}.json", folder / f"{settings.job}{LAUNCHER}.json"


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of an earlier start; None where there is none that can be used."""
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                return None
            document = json.loads(file.read(_RECORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return document if _is_record(document) else None


def _is_record(document: Any) -> bool:
    """Whether it has all that is looked for in it: it may be another node's."""
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
    """Whether a file that begins with "#!" can name its interpreter."""
    executable = record["executable"]
    line = f"#!{executable} -ISE"
    return (
        len(line) <= _FIRST_LINE_MAX
        and " " not in executable
        and os.access(executable, os.X_OK, effective_ids=True)
    )


def words_of(record: Mapping[str, Any], command: tuple[str, ...]) -> list[str]:
    """The words by which the kernel starts the command; empty: it is not the record's program."""
    executable = record["executable"]
    words = list(command)
    if words[0] != executable and (script := _script(words[0], executable)):
        words = [executable, script, *words[1:]]
    is_program = words[0] == executable and program_words(words) == record["words"]
    return words if is_program else []


def _script(name: str, executable: str) -> str:
    """The path of a program of this name whose first line names the interpreter; or nothing."""
    places = [""] if "/" in name else os.get_exec_path()
    path = next((one for one in (os.path.join(p, name) for p in places) if _can_run(one)), "")
    try:
        with Path(path).open("rb") as file:
            lines = file.read(_LOOK_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    # The second line is that of pip and uv where the first one would be too long.
    arguments = '"$0" "$@"'
    of_shell = (f"'''exec' {executable} {arguments}", f"'''exec' \"{executable}\" {arguments}")
    is_its = lines[:1] == [f"#!{executable}"] or (
        lines[:1] == ["#!/bin/sh"] and any(line in of_shell for line in lines[1:2])
    )
    return path if is_its else ""


def _can_run(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
