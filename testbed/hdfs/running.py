"""HDFS clusters for the length of a block."""

import contextlib
import os
from collections.abc import Iterator
from typing import TypeVar

from testbed.hdfs.cluster import MiniHdfs
from testbed.needs import MissingError

Cluster = TypeVar("Cluster", bound=MiniHdfs)


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Start the cluster, and stop it at the end of the block.

    Raises: MissingError where HDFS cannot run; RuntimeError instead if BOOTSEER_REQUIRE_HDFS is
    set.
    """
    try:
        cluster.start()
    except MissingError as error:
        if os.environ.get("BOOTSEER_REQUIRE_HDFS"):
            raise RuntimeError(f"there must be an HDFS: {error}") from error
        raise MissingError(f"no HDFS here: {error}") from error
    try:
        yield cluster
    finally:
        cluster.stop()
