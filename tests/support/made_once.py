"""`made_once`: folders that one worker makes and all workers of a run read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.waiting import locked

_MAKING_S = 200.0


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run, not to be changed.

    The first worker that needs the folder makes it by `make(folder)`.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    is_made = base / f"{name}.made"
    with locked(base / f"{name}.lock", _MAKING_S, RuntimeError):
        if not is_made.exists():
            make(base / name)
            is_made.touch()
    return base / name
