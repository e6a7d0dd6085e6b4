"""An HDFS for the tests of a module or session."""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

import pytest

from tests.hdfs.classpath import CannotAssembleError
from tests.hdfs.cluster import MiniHdfs

Cluster = TypeVar("Cluster", bound=MiniHdfs)


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Start it, and stop it at the end; skip where it cannot be had, unless it must be."""
    try:
        cluster.start()
    except CannotAssembleError as error:
        if os.environ.get("BOOTSEER_REQUIRE_HDFS"):
            raise
        pytest.skip(f"no HDFS here: {error}")
    try:
        yield cluster
    finally:
        cluster.stop()
