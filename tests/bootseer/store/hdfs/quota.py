"""Quotas of a real HDFS."""

import getpass
import os
from urllib.parse import urlsplit

from bootseer.store.hdfs.namenode import NameNode
from tests.bootseer.store.hdfs import protobuf as pb

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
    request = pb.text(1, parts.path) + pb.number(2, _DONT_SET) + pb.number(3, quota_bytes)
    name_node.answer("setQuota", request)
