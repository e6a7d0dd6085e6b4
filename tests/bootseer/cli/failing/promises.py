"""Promises of every command that fails, and the means to break its world."""

import os
from pathlib import Path

from tests.bootseer.cli.conftest import Result

INVALID, NOT_FOUND, EXISTS, DENIED, NO_SPACE = 2, 10, 11, 12, 13
DEADLINE, CORRUPT, UNKNOWN, UNAVAILABLE = 14, 15, 16, 17


def check(result: Result, code: int | tuple[int, ...], *mentions: str) -> None:
    """Assert the promise about errors."""
    where = f"{result.arguments}: exit {result.code}\n{result.err}"
    assert result.in_time, where
    assert result.code in (code if isinstance(code, tuple) else (code,)), where
    assert "Traceback" not in result.err, where
    assert "internal error" not in result.err, where
    assert result.out == "", where
    lines = result.err.splitlines()
    if lines and lines[0].startswith("Usage: "):
        assert lines[-1].startswith("Error: "), where
        assert sum(line.startswith("Error: ") for line in lines) == 1, where
    else:
        # The fault, after messages about earlier findings and waits.
        notes = ("warning: ", "waiting up to ", "restoring to ", "a new store begins in ")
        before = tuple(f"bootseer: {note}" for note in notes)
        assert all(line.startswith(before) for line in lines[:-1]), where
        assert lines, where
        assert not lines[-1].startswith("bootseer: warning: "), where
        assert lines[0].startswith("bootseer: "), where
        # The reason, not only that it failed.
        assert len(lines[0]) > 30, where
    for mention in mentions:
        assert mention in result.err, where


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return every name below `folder`, temporaries included, with the contents of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


STORE_COMMANDS: list[tuple[str, ...]] = [
    ("image", "list"),
    ("image", "index", "src"),
    ("image", "show", "image:1"),
    ("image", "ls", "image:1"),
    ("image", "mount", "image:1", "mnt"),
    ("run", "--image", "image:1", "--", "true"),
    ("image", "fetch", "image:1"),
    ("image", "trace", "list", "image:1"),
    ("image", "trace", "show", "image:1"),
    ("snapshot", "create", "--target", "src"),
    ("snapshot", "list"),
    ("snapshot", "show", "env"),
    ("snapshot", "restore", "env"),
    ("snapshot", "fetch", "env"),
    ("run", "--image", "image:1", "--", "true"),
]


IMAGE_READERS: list[tuple[str, ...]] = [
    ("image", "ls", "image:1"),
    ("image", "fetch", "image:1"),
    ("image", "mount", "image:1", "mnt"),
]
SNAPSHOT_READERS: list[tuple[str, ...]] = [
    ("snapshot", "show", "env", "--files"),
    ("snapshot", "restore", "env", "--to", "restored"),
    ("snapshot", "fetch", "env"),
]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 0x40
    elif how == "truncate":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    elif how == "noise":
        data[:] = os.urandom(len(data))
    elif how == "nul":
        data[:] = bytes(len(data))
    elif how == "deep":
        data[:] = b"[" * 200_000
    path.write_bytes(data)
