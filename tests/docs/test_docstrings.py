"""Public names of the product have docstrings, and docstrings name only modules that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

import bootseer
from testbed.paths import REPOSITORY

PRODUCT = ("bootseer", "fuse", "prefetch", "snapshots")
# `blob.extract` or `fuse/kernel/session.py`, in backquotes.
_DOTTED = re.compile(r"`([A-Za-z_][\w/]*(?:\.[A-Za-z_]\w*)+)`")
# Names with dots that are no modules: files of other kinds, and names in other programs.
_NO_MODULES = re.compile(
    r".+\.(?:json|toml|html|jsonl|sh|yaml|io|lock|sock|log)|containerd\..+|linux\.seccomp"
)

_HAS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@cache
def _modules() -> dict[str, ast.Module]:
    """Return the product's modules by dotted name, without the symbolic links."""
    found = {}
    for root in PRODUCT:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
            # The links in `bootseer` lead to the packages beside it.
            if parts[0] == "bootseer" and len(parts) > 1 and parts[1] in PRODUCT[1:]:
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def _docstrings(module: ast.Module) -> Iterator[tuple[str, str]]:
    nodes: list[ast.AST] = [module]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "the module"), text
        # Expressions are skipped: they are most of a tree and define no names.
        nodes += (one for one in ast.iter_child_nodes(node) if isinstance(one, _HAS_STATEMENTS))


@pytest.mark.parametrize("root", PRODUCT)
def test_public_names_have_docstrings(root: str) -> None:
    missing = [
        f"{name}: {member}"
        for name, module in _modules().items()
        if name.split(".")[0] == root
        for member in _without_docstring(module)
    ]
    assert not missing


def _without_docstring(module: ast.Module) -> list[str]:
    """Return the public names of a module that have no docstring, and "the module" if it has none.

    Methods are not checked: a method without a docstring keeps the promise of its base class.
    """
    missing = [] if ast.get_docstring(module) else ["the module"]
    for node in module.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            missing.append(node.name)
    return missing


def test_modules_and_files_that_docstrings_name_exist() -> None:
    files = [name.replace(".", "/") + ".py" for name in _modules()]
    rooms = {part for name in _modules() for part in name.split(".")}
    gone = []
    for name, module in _modules().items():
        for owner, text in _docstrings(module):
            for token in _DOTTED.findall(text):
                if token.endswith(".py"):
                    exists = any(f"/{file}".endswith(f"/{token}") for file in files)
                elif token.split(".")[0] not in rooms or _NO_MODULES.fullmatch(token):
                    continue
                else:
                    exists = _is_named(token) or f'"{token}"' in _texts()
                if not exists:
                    gone.append(f"{name}: {owner}: `{token}`")
    assert not gone, "\n".join(gone)


@cache
def _is_named(token: str) -> bool:
    """Return whether a dotted name, or its end, is a module or a name in one."""
    if token.startswith("bootseer.") and hasattr(bootseer, token.removeprefix("bootseer.")):
        return True
    parts = token.removeprefix("bootseer.").split(".")
    for count in range(len(parts), 0, -1):
        suffix = "." + ".".join(parts[:count])
        for name, module in _modules().items():
            if f".{name}".endswith(suffix) and _has(module, parts[count:]):
                return True
    return False


def _has(module: ast.Module | ast.ClassDef, path: list[str]) -> bool:
    if not path:
        return True
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == path[0]:
            return len(path) == 1 or _has(node, path[1:])
        if len(path) == 1 and path[0] in _bound(node):
            return True
    return False


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).split(".")[0] for one in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


@cache
def _texts() -> str:
    """Return the text of all modules, to find quoted names of attributes in it."""
    return "".join(
        (REPOSITORY / f"{name.replace('.', '/')}{end}").read_text(encoding="utf-8")
        for name in _modules()
        for end in (".py", "/__init__.py")
        if (REPOSITORY / f"{name.replace('.', '/')}{end}").is_file()
    )


def test_a_name_that_is_gone_is_found() -> None:
    assert _is_named("store.backend.Backend")
    assert _is_named("bootseer.errors")
    assert not _is_named("store.backend.Front")
    assert not _is_named("store.front")
