"""Counters of this process's requests to servers that all nodes of a start share.

NameNodes, buckets and registries limit how many nodes can start at once. The code that sends a
request counts it; stages of the timeline record the counts, and the report shows them by node. A
forked child starts at zero. Any thread. Imports the standard library only, since training processes
load this module too.
"""

import os
import threading

NAMENODE, BUCKET, HTTP = "namenode", "bucket", "http"
"""Kinds of requests: HDFS calls that ask a NameNode; requests to S3, GCS or Azure; requests to
registries and web servers."""
KINDS = (NAMENODE, BUCKET, HTTP)
PREFIX = "requests."
"""Prefix of the figures' names."""

_counts = dict.fromkeys(KINDS, 0)
_lock = threading.Lock()


def count_request(kind: str) -> None:
    """Count a request of one of `KINDS`."""
    with _lock:
        _counts[kind] += 1


def request_counts() -> dict[str, int]:
    """Return the number of requests so far by figure name ("requests.bucket")."""
    return {PREFIX + kind: number for kind, number in _counts.items()}


def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.update(dict.fromkeys(KINDS, 0))


os.register_at_fork(after_in_child=_begin_anew)
