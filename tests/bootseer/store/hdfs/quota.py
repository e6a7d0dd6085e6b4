"""Quotas of a real HDFS."""

from urllib.parse import urlsplit

from bootseer.store.hdfs.namenode import CallWait, NameNodes
from tests.bootseer.store.hdfs import protobuf as pb

# Leave the other quota as it is (HdfsConstants.QUOTA_DONT_SET).
_DONT_SET = 2**63 - 1


def set_space_quota(url: str, quota_bytes: int) -> None:
    """Limit the size of all replicas below the folder at `url`."""
    parts = urlsplit(url)
    request = pb.text(1, parts.path) + pb.number(2, _DONT_SET) + pb.number(3, quota_bytes)
    NameNodes(f"hdfs://{parts.netloc}", 20.0).answer("setQuota", request, CallWait.USUAL)
