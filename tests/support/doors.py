"""Modules of the product that tests import: doors (tests/doors.txt), or parts (tests/parts.txt).

`python -m tests.support.doors` writes tests/parts.txt anew from the tests' imports.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from testbed.paths import REPOSITORY

PRODUCT = "bootseer"
_NAME = rf"{PRODUCT}(?:\.\w+)*"
# Imports in the text of a program for another process.
_CODE = re.compile(rf"^ *(?:from ({_NAME}) import ([\w, ]+)|import ({_NAME}))", re.MULTILINE)
DOORS = REPOSITORY / "tests/doors.txt"
PARTS = REPOSITORY / "tests/parts.txt"
_HEAD = """\
# Tests of single parts of the product, on purpose: the file, and the modules that are no doors. A
# part changes together with its test. This list should get shorter.
# `python -m tests.support.doors` writes it.
"""


def read_doors() -> set[str]:
    """Return the names of the modules that every test may import."""
    return set(_lines(DOORS))


def read_parts() -> dict[str, list[str]]:
    """Return by file the modules, other than doors, that the file may import."""
    return {path: parts for path, *parts in map(str.split, _lines(PARTS))}


def _lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def modules() -> set[str]:
    """Return the names of all modules and packages of the product."""
    top = REPOSITORY / PRODUCT
    # Three packages are symbolic links, which `rglob` does not follow.
    folders = [top, *(entry for entry in top.iterdir() if entry.is_symlink())]
    files = {top / path.relative_to(top) for folder in folders for path in folder.rglob("*.py")}
    names = (".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__") for name in names}


def imported(source: str, known: set[str]) -> set[str]:
    """Return the modules of `known` that the source text uses.

    The text imports them, lets another process import them, or names objects to replace in them.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= _from(node.module, (alias.name for alias in node.names), known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names, plain in _CODE.findall(node.value):
                found |= {plain} if plain else _from(module, names.split(","), known)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            place = node.args[0] if node.args and node.func.attr == "setattr" else None
            if isinstance(place, ast.Constant) and isinstance(place.value, str):
                found.add(_module_of(place.value, known))
    return found & known


def _from(module: str, names: Iterable[str], known: set[str]) -> set[str]:
    """Return the modules that `from MODULE import NAMES` uses."""
    wholes = (f"{module}.{name.split()[0]}" for name in names if name.strip())
    return {whole if whole in known else module for whole in wholes}


def _module_of(path: str, known: set[str]) -> str:
    """Return the module of `known` that a dotted path begins with, or ""."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


def parts_of(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each file below a folder that imports other modules than doors, and those modules."""
    known, doors = modules(), read_doors()
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        parts = sorted(imported(path.read_text(encoding="utf-8"), known) - doors)
        if parts:
            yield str(path.relative_to(REPOSITORY)), parts


def main() -> None:
    lines = [f"{path} {' '.join(parts)}\n" for path, parts in parts_of("tests")]
    PARTS.write_text(_HEAD + "\n" + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
