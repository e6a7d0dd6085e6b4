"""Environments made by real tools, and checks of moved ones."""

import base64
import csv
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from bootseer.settings.config import Settings
from bootseer.snapshots.restore import restore_snapshot
from testbed.needs import MissingError
from testbed.trees import describe, differences

TOOLS = Path(sys.executable).parent


def tool(name: str) -> str:
    if not (TOOLS / name).exists():
        raise MissingError(
            f"{name} is not installed beside this Python (it is one of the dev extras)"
        )
    return str(TOOLS / name)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def pip(env: Path, *arguments: str | Path) -> str:
    """Return the output of pip about the environment, which may have no pip of its own."""
    return run(sys.executable, "-m", "pip", "--python", env / "bin/python", *arguments)


def check_records(env: Path) -> None:
    count = 0
    for record in env.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        with record.open(newline="") as file:
            for path, digest, size in csv.reader(file):
                found = record.parent.parent / path
                if not digest:
                    continue
                content = found.read_bytes()
                encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
                assert digest == "sha256=" + encoded.rstrip("="), path
                assert int(size) == len(content), path
                count += 1
    assert count > 2


def files_with_path(env: Path, old: Path) -> list[str]:
    """Return the files and links that still contain the old path; bytecode may name its source."""
    found = []
    for path in env.rglob("*"):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISREG(info.st_mode) and path.suffix != ".pyc":
            data = path.read_bytes()
        else:
            continue
        if os.fsencode(old) in data:
            found.append(str(path.relative_to(env)))
    return found


def is_bytecode_unchanged(before: dict[str, dict[str, object]], env: Path) -> bool:
    """Return whether all bytecode is as before, so that nothing was compiled again.

    A new compilation would contain another path.
    """
    after = describe(env)
    bytecode = [path for path in before if path.endswith(".pyc")]
    return bool(bytecode) and all(before[path] == after.get(path) for path in bytecode)


def restore_and_relocate(settings: Settings, key: str, env: Path, other: Path) -> list[str]:
    """Restore at the same path and compare everything; then relocate, and return the messages."""
    original = describe(env)
    shutil.rmtree(env)
    restore_snapshot(settings, key)
    assert differences(original, describe(env)) == []
    shutil.rmtree(env)
    said: list[str] = []
    restore_snapshot(settings, key, other, relocates=True, report=said.append)
    moved = describe(other)
    # Only the content and its consequences differ, and no name is new.
    allowed = (": content: ", ": size: ", ": target: ")
    lines = [line for line in differences(original, moved) if not any(a in line for a in allowed)]
    # Except the bytecode of a changed source.
    assert [line for line in lines if "finder.cpython" not in line] == []
    assert files_with_path(other, env) == []
    return said
