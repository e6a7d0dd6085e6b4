"""Docstrings of the product: every public module, class and function has one."""

import ast
from pathlib import Path

import pytest

from tests.support.named_tests import REPOSITORY

PRODUCT = ("bootseer", "fuse", "prefetch", "snapshots")
# Hadoop's own definitions describe these messages.
_DESCRIBED_ELSEWHERE = Path("bootseer/store/hdfs/rpc/messages.py")


@pytest.mark.parametrize("root", PRODUCT)
def test_public_names_have_docstrings(root: str) -> None:
    missing = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in sorted((REPOSITORY / root).rglob("*.py"))
        if path.relative_to(REPOSITORY) != _DESCRIBED_ELSEWHERE
        for name in _without_docstring(ast.parse(path.read_text(encoding="utf-8")))
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
