"""Fixtures of the tests of images."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Empty store in a folder."""
    with open_store(str(tmp_path / "store")) as opened:
        yield opened
