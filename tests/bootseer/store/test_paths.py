"""URLs of stores, taken apart."""

import pytest

from bootseer.store.paths import folder_above


@pytest.mark.parametrize(
    ("url", "above"),
    [
        ("hdfs://nn:8020/a/b", "hdfs://nn:8020/a"),
        ("hdfs://nn:8020/a/b/?replication=2", "hdfs://nn:8020/a?replication=2"),
        ("hdfs://nn:8020/a", None),
        ("hdfs://nn:8020/", None),
        ("hdfs://nn:8020", None),
        ("file:///mnt/a", "file:///mnt"),
        ("file:///", None),
        ("/mnt/a b", "file:///mnt"),
        ("limit+file:///mnt/a?rate=1", "limit+file:///mnt?rate=1"),
    ],
)
def test_the_folder_above_a_url(url: str, above: str | None) -> None:
    assert folder_above(url) == above
