"""A directory with a real Python package in it, and `bootseer warm` on it as a user runs it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.paths import REPOSITORY
from testbed.waiting import wait_for

DEADLINE_S = 60.0
_MODULE_COUNT = 12

IMPORT = "import package, sys; sys.stdout.write(str(package.TOTAL))"


def make_package(directory: Path) -> int:
    """A package whose import reads modules and a part of a data file; returns its TOTAL."""
    package = directory / "package"
    package.mkdir(parents=True)
    lines = ["import mmap, os", "TOTAL = 0"]
    for number in range(_MODULE_COUNT):
        (package / f"m{number}.py").write_text(f"VALUE = {number}\n" + "# filler\n" * 3000)
        lines.append(f"from package.m{number} import VALUE; TOTAL += VALUE")
    # Pages far apart, as the relocations of a shared library are.
    lines += [
        "with open(os.path.join(os.path.dirname(__file__), 'data'), 'rb') as file:",
        "    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)",
        "    view.madvise(mmap.MADV_RANDOM)",
        "    TOTAL += sum(view[at] for at in range(0, 2**20, 8192))",
    ]
    (package / "__init__.py").write_text("\n".join(lines) + "\n")
    (package / "data").write_bytes(b"\1" * 2**22)
    (package / "never.py").write_text("# nobody reads this\n" * 1000)
    return sum(range(_MODULE_COUNT)) + 128


def evict(directory: Path) -> None:
    """Drop the clean pages of every file below `directory` from the page cache."""
    os.sync()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Node:
    """One node's settings, and the store that it shares with others."""

    folder: Path
    store: Path

    def run(self, *arguments: object, prefix: tuple[str, ...] = (), deadline_s: int = 30) -> Ended:
        """`bootseer ARGUMENTS`, to its end."""
        command = [*prefix, sys.executable, "-m", "bootseer", *map(os.fspath, map(str, arguments))]
        done = subprocess.run(
            command,
            cwd="/",
            env={
                **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(self.folder),
                "BOOTSEER_STORE": str(self.store),
                "BOOTSEER_RUN_DIR": str(self.folder / "run"),
                "BOOTSEER_DEADLINE": str(deadline_s),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def warm_import(
        self, directory: Path, *options: object, code: str = IMPORT, deadline_s: int = 30
    ) -> Ended:
        """`bootseer warm DIRECTORY` around a Python that imports the package there."""
        script = f"import sys; sys.path.insert(0, {str(directory)!r}); {code}"
        command = (sys.executable, "-S", "-c", script)
        return self.run("warm", *options, directory, "--", *command, deadline_s=deadline_s)

    def until(self, action: str) -> str:
        """Python code that waits until the process in the background says that it did this."""
        states = str(self.folder / "run" / "warm" / "*.json")
        return (
            "import glob, json, time\n"
            f"while not [p for p in glob.glob({states!r}) if json.load(open(p))['action'] == "
            f"{action!r}]: time.sleep(0.01)\n"
        )

    def last(self) -> dict[str, Any]:
        """What the process in the background did, once it has done it."""
        ended: list[dict[str, Any]] = []

        def find() -> bool:
            for path in (self.folder / "run" / "warm").glob("*.json"):
                state: dict[str, Any] = json.loads(path.read_text())
                if state["action"] in ("read", "recorded") and not _lives(state["pid"]):
                    ended.append(state)
            return bool(ended)

        wait_for(find, "the end of warming")
        return ended[0]

    def shown(self, directory: Path, *options: object) -> dict[str, Any]:
        """`bootseer warm --show --json`, once nothing is under way any more."""
        done = self.run("warm", "--show", "--json", *options, directory)
        assert done.code == 0, done.err
        document: dict[str, Any] = json.loads(done.out)
        return document


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The first node."""
    return Node(tmp_path / "node", tmp_path / "store")


@pytest.fixture
def other_node(tmp_path: Path) -> Node:
    """Another node with the same store."""
    return Node(tmp_path / "other node", tmp_path / "store")
