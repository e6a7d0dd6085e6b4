"""Tools that make environments, and what is checked of one that has been moved."""

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
    """What pip says about the environment, which need not have one."""
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


def holding(env: Path, old: Path) -> list[str]:
    """Files and links in which the old path is left; bytecode names its source, which is fine."""
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


def is_unwritten(before: dict[str, dict[str, object]], env: Path) -> bool:
    """Whether all bytecode is as it was, so that nothing was compiled again. A new compilation
    would have another path in it."""
    after = describe(env)
    bytecode = [path for path in before if path.endswith(".pyc")]
    return bool(bytecode) and all(before[path] == after.get(path) for path in bytecode)


def both_ways(settings: Settings, key: str, env: Path, other: Path) -> list[str]:
    """Restore at the same path and compare everything; then relocate; what was said."""
    original = describe(env)
    shutil.rmtree(env)
    restore_snapshot(settings, key)
    assert differences(original, describe(env)) == []
    shutil.rmtree(env)
    said: list[str] = []
    restore_snapshot(settings, key, other, relocates=True, report=said.append)
    moved = describe(other)
    # Nothing but content and what follows from it differs, and no name is new.
    allowed = (": content: ", ": size: ", ": target: ")
    lines = [line for line in differences(original, moved) if not any(a in line for a in allowed)]
    # But for bytecode of a source that has changed.
    assert [line for line in lines if "finder.cpython" not in line] == []
    assert holding(other, env) == []
    return said
