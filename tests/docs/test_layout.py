"""The house can be walked through: few entries in a folder, short files, whole docstrings."""

import ast
import os
import re
import statistics
from pathlib import Path

import pytest

from tests.support.named_tests import REPOSITORY

PRODUCT = ("bootseer", "fuse", "prefetch", "snapshots")
ENTRIES_MAX = 14
# The package itself: all the rooms that CONTRIBUTING.md lists.
ROOMS_MAX = 15
PRODUCT_LINES_MAX = 350
PRODUCT_LINES_MEDIAN_MAX = 160
TEST_LINES_MAX = 405
# What Python and packaging ask for, and the links to the folders beside `bootseer`.
_NOT_COUNTED = ("__init__.py", "__main__.py", "__pycache__", "py.typed")
# Hadoop's own definitions say what its messages mean.
_DESCRIBED_ELSEWHERE = Path("bootseer/store/hdfs/rpc/messages.py")
# Users import these two by their names.
_PUBLIC = (Path("bootseer/checkpoints.py"), Path("bootseer/errors.py"))


def folders(*roots: str) -> list[Path]:
    """The folders below `roots` with files in them; `bootseer` links to the other packages."""
    return [
        Path(folder)
        for root in roots
        for folder, _, _ in os.walk(REPOSITORY / root)
        if any(True for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    ]


def modules(*roots: str) -> list[Path]:
    """The Python files below `roots`."""
    return [path for folder in folders(*roots) for path in sorted(folder.glob("*.py"))]


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def shown(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


# Of the results of benchmarks there is a file for each case.
FOLDERS = [one for one in folders(*PRODUCT, "tests", "bench") if one.name != "results"]


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_a_folder_has_few_entries(folder: Path) -> None:
    entries = [
        path.name
        for path in folder.iterdir()
        if (path.is_file() or path in FOLDERS)
        and path.name not in _NOT_COUNTED
        and not path.is_symlink()
        and path.relative_to(REPOSITORY) not in _PUBLIC
    ]
    most = ROOMS_MAX if folder == REPOSITORY / "bootseer" else ENTRIES_MAX
    assert len(entries) <= most, f"{shown(folder)} has {len(entries)} entries: {entries}"


def test_the_map_of_the_design_names_each_room() -> None:
    page = (REPOSITORY / "docs/design.md").read_text(encoding="utf-8")
    house = page.partition("## The house")[2].partition("`prefetch`, `snapshots`")[0]
    named = set(re.findall(r"(?<![\w/])(\w+)/", house))
    below = (folder for root in PRODUCT for folder in (REPOSITORY / root).iterdir())
    rooms = {folder.name for folder in below if folder in FOLDERS and not folder.is_symlink()}
    assert not rooms - named
    known = {part for folder in FOLDERS for part in folder.relative_to(REPOSITORY).parts}
    assert named - known <= {"docker", "dev"}


def test_no_file_is_long() -> None:
    long = {shown(p): n for p in modules(*PRODUCT) if (n := line_count(p)) > PRODUCT_LINES_MAX}
    assert not long
    tests = {
        shown(p): n for p in modules("tests", "bench") if (n := line_count(p)) > TEST_LINES_MAX
    }
    assert not tests


def test_most_files_are_short() -> None:
    assert statistics.median(map(line_count, modules(*PRODUCT))) <= PRODUCT_LINES_MEDIAN_MAX


@pytest.mark.parametrize("root", PRODUCT)
def test_modules_classes_and_functions_say_what_they_are(root: str) -> None:
    silent = [
        f"{shown(path)}: {name}"
        for path in modules(root)
        if path.relative_to(REPOSITORY) != _DESCRIBED_ELSEWHERE
        for name in _silent_in(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def _silent_in(module: ast.Module) -> list[str]:
    """The public names of a module, and the module itself, that have no docstring.

    A method without one does what the method of its base class promises.
    """
    silent = [] if ast.get_docstring(module) else ["the module"]
    for node in module.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            silent.append(node.name)
    return silent


@pytest.mark.parametrize("path", modules(*PRODUCT), ids=shown)
def test_what_is_called_pure_touches_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    if "Pure (no I/O" in docstring:
        found = re.findall(
            r"^(?:import|from) (subprocess|socket|threading|shutil|time)\b", text, re.M
        )
        assert not found, f"{shown(path)} says that it is pure, and imports {found}"
