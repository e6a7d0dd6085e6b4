"""A node for each test, and what needs privileges."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.harness import Node, node_at


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A fresh node with a store of its own."""
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as made:
        yield made
