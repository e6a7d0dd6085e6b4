"""statfs: size and free space of the storage."""

import contextlib

import pytest

from bootseer.store import open_backend
from tests.bootseer.store.hdfs.quota import set_space_quota


@pytest.mark.hdfs
def test_space_is_the_quota_or_the_cluster(hdfs_url: str) -> None:
    with contextlib.closing(open_backend(hdfs_url)) as backend:
        backend.mkdir("")
        cluster = backend.space()
    assert cluster is not None
    assert 0 < cluster.free_bytes <= cluster.total_bytes
    set_space_quota(hdfs_url, 2**30)
    with contextlib.closing(open_backend(hdfs_url)) as backend:
        limited = backend.space()
        assert limited is not None
        assert limited.total_bytes == 2**30
        with backend.create("f") as writer:
            writer.write(bytes(1_000_000))
        # The cached answer.
        assert backend.space() == limited
    with contextlib.closing(open_backend(hdfs_url)) as backend:
        after = backend.space()
        assert after is not None
        assert limited.free_bytes - after.free_bytes >= 1_000_000


def test_a_cluster_that_is_not_there_has_no_space() -> None:
    with contextlib.closing(open_backend("hdfs://127.0.0.1:1/x", deadline_s=2)) as backend:
        assert backend.space() is None
