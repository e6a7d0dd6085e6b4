"""Fixtures of the tests with real training formats."""

import importlib.util
from collections.abc import Iterator

import pytest

from testbed.needs import MissingError
from tests.fuse.formats.host import TorchHost


@pytest.fixture(scope="session")
def torch_host() -> Iterator[TorchHost]:
    """Process with torch and safetensors that runs checks."""
    for name in ("torch", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is not installed: pip install 'bootseer[formats]'")
    host = TorchHost()
    try:
        yield host
    finally:
        host.close()
