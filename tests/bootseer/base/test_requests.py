"""Requests to shared servers are counted separately in each process."""

import os

from bootseer.base.requests import BUCKET, count_request, request_counts


def test_a_fork_counts_anew() -> None:
    before = request_counts()["requests.bucket"]
    count_request(BUCKET)
    assert request_counts()["requests.bucket"] == before + 1
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        count_request(BUCKET)
        os.write(theirs, str(request_counts()["requests.bucket"]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 10) == b"1"
    os.close(ours)
    os.close(theirs)
