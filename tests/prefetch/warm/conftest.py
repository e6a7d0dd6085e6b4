"""A directory with a real Python package, and `bootseer warm` on it as a user runs it."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.node import Completed, Node
from testbed.page_cache import cached_bytes
from testbed.waiting import polling, wait_for

DEADLINE_S = 60.0
_MODULE_COUNT = 12

IMPORT = "import package, sys; sys.stdout.write(str(package.TOTAL))"


def make_package(directory: Path) -> int:
    """Make a package whose import reads modules and a part of a data file; return its TOTAL."""
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


def is_evicted(path: Path) -> bool:
    """Drop the pages of a file from the page cache; return whether none is left."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return cached_bytes(path) == 0


def evict(directory: Path) -> None:
    """Drop the pages of every file below `directory` from the page cache.

    A page that the kernel holds at that moment, as while it moves it, stays: so it is tried again
    for a while, but not for long, since all pages of a file system in memory stay.
    """
    left = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    for _ in polling(2.0):
        left = [path for path in left if not is_evicted(path)]
        if not left:
            break


class WarmingNode(Node):
    """Node on which folders are warmed."""

    def __init__(self, base: Path, store: Path) -> None:
        self.folder_of_store = store
        super().__init__(
            base, str(store), variables={"BOOTSEER_DEADLINE": "30", "PYTHONDONTWRITEBYTECODE": "1"}
        )

    def warm_import(
        self, directory: Path, *options: object, code: str = IMPORT, deadline_s: int = 30
    ) -> Completed:
        """Run `bootseer warm DIRECTORY` around a Python that imports the package."""
        script = f"import sys; sys.path.insert(0, {str(directory)!r}); {code}"
        command = (sys.executable, "-S", "-c", script)
        variables = {"BOOTSEER_DEADLINE": str(deadline_s)}
        return self.run("warm", *options, directory, "--", *command, variables=variables)

    def until(self, action: str) -> str:
        """Return Python code that waits until the background process reports this action."""
        states = str(self.base / "cache" / "warm" / "*.json")
        return (
            "import glob, json, time\n"
            f"while not [p for p in glob.glob({states!r}) if json.load(open(p))['action'] == "
            f"{action!r}]: time.sleep(0.01)\n"
        )

    def last(self) -> dict[str, Any]:
        """Return the background process's last action, once it has ended."""
        ended: list[dict[str, Any]] = []

        def find() -> bool:
            for path in (self.base / "cache" / "warm").glob("*.json"):
                state: dict[str, Any] = json.loads(path.read_text())
                if state["action"] in ("read", "recorded") and not _lives(state["pid"]):
                    ended.append(state)
            return bool(ended)

        wait_for(find, "the end of warming")
        return ended[0]

    def shown(self, directory: Path, *options: object) -> dict[str, Any]:
        """Return the output of `bootseer warm --show --json` once no process is at work."""
        done = self.run("warm", "--show", "--json", *options, directory)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def node(tmp_path: Path) -> Iterator[WarmingNode]:
    """First node."""
    made = WarmingNode(tmp_path / "node", tmp_path / "store")
    yield made
    made.sweep()


@pytest.fixture
def other_node(tmp_path: Path) -> Iterator[WarmingNode]:
    """Another node with the same store."""
    made = WarmingNode(tmp_path / "other node", tmp_path / "store")
    yield made
    made.sweep()
