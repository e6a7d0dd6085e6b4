"""Quotas of a real HDFS."""

import getpass
import os
from urllib.parse import urlsplit

from bootseer.store.hdfs.rpc.calls import NameNode

# Leave the other quota as it is (HdfsConstants.QUOTA_DONT_SET).
_DONT_SET = 2**63 - 1


def set_space_quota(url: str, quota_bytes: int) -> None:
    """Let all replicas of what is below the folder at `url` take so much."""
    parts = urlsplit(url)
    assert parts.hostname
    name_node = NameNode(
        ((parts.hostname, parts.port or 8020),),
        os.environ.get("HADOOP_USER_NAME") or getpass.getuser(),
        20.0,
    )
    name_node._call("setQuota", parts.path, _DONT_SET, quota_bytes)
