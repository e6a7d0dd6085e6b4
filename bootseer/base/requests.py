"""Count of the requests of this process to servers that all nodes of a start share.

A start that asks little of a NameNode, a bucket or a registry can have many nodes. Whoever sends a
request counts it; stages note how many there were, and the report has them by node. A fork counts
anew. Any thread. Only the standard library is imported: training processes load it, too.
"""

import os
import threading

NAMENODE, BUCKET, HTTP = "namenode", "bucket", "http"
"""Calls of HDFS that ask a NameNode; requests to S3, GCS or Azure; requests to registries and web
servers."""
KINDS = (NAMENODE, BUCKET, HTTP)
PREFIX = "requests."
"""Of the figures' names."""

_counts = dict.fromkeys(KINDS, 0)
_lock = threading.Lock()


def count_request(kind: str) -> None:
    """Count a request of one of `KINDS`."""
    with _lock:
        _counts[kind] += 1


def counted() -> dict[str, int]:
    """Return the requests so far, by figure: "requests.bucket"."""
    return {PREFIX + kind: number for kind, number in _counts.items()}


def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.update(dict.fromkeys(KINDS, 0))


os.register_at_fork(after_in_child=_begin_anew)
