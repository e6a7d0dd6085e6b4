"""Requests to a NameNode in a start that replays everything; docs/hdfs.md lists them."""

from collections import Counter
from pathlib import Path

import pytest

from testbed.hdfs.cluster import MiniHdfs
from testbed.node import Node, node_at
from tests.bootseer.launch.conftest import Image

pytestmark = [pytest.mark.hdfs, pytest.mark.needs("mount", "fuse")]

SET_UP = 'import os; os.makedirs("/env"); open("/env/x", "wb").write(os.urandom(5_000_000))'
JOB = """
import decimal, email, os
print(os.listdir("/env"), os.listdir("/kept"))
open("/kept/entry", "w").write("compiled")
if not os.path.exists("/ckpt/step-1"):
    open("/ckpt/step-1", "wb").write(os.urandom(20_000_000))
print(len(open("/ckpt/step-1", "rb").read()))
"""


Requests = Counter[tuple[str, str]]
"""Numbers of calls of the NameNode, by command and path."""


def _requests(hdfs: MiniHdfs, folder: str, node: Node, job: tuple[str, ...]) -> Requests:
    before = len(hdfs.audited(folder))
    done = node.run("run", *job)
    assert done.returncode == 0, done.stderr
    node.wait_clean()
    audited = hdfs.audited(folder)[before:]
    # A name in the mounted folder is shown for a second.
    looked_up = ("getfileinfo", f"{folder}/step-1")
    # When the job has ended, it is seen whether another node has kept more.
    end = len(audited) - audited[::-1].index(looked_up)
    return Counter(
        one
        for number, one in enumerate(audited)
        if one != looked_up and (number < end or "/snapshots/" not in one[1])
    )


def _repeated(asked: Requests) -> Requests:
    return asked - Counter(set(asked))


def test_each_object_of_a_replayed_start_is_asked_for_once(
    hdfs: MiniHdfs, tmp_path: Path, image: Image
) -> None:
    folder = f"/{tmp_path.parent.name}-{tmp_path.name}"
    url = hdfs.url + folder
    line = f"python3 -c '{SET_UP}'"
    job: tuple[str, ...] = (
        "--image",
        image.source,
        "--setup",
        line,
        "--target",
        "/env",
        "--keep",
        "/kept",
    )
    job += ("--checkpoint", f"{url}:/ckpt", "--", "python3", "-c", JOB)
    with node_at(tmp_path / "a", f"{url}/store") as first:
        for _ in range(2):
            _requests(hdfs, folder, first, job)
    with node_at(tmp_path / "b", f"{url}/store") as second:
        asked = _requests(hdfs, folder, second, job)
    opened = {path for command, path in asked if command == "open"}
    for kind in ("images", "indexes", "blobs", "bundles", "hot", "snapshots"):
        assert any(f"/store/{kind}/" in path for path in opened), kind
    assert {path for path in opened if "/.bootseer-parts/" in path}
    again = _repeated(asked)
    if again.total() > 1:
        # On a busy machine reads may be late, and are asked for again: in another start, others.
        with node_at(tmp_path / "c", f"{url}/store") as third:
            again &= _repeated(_requests(hdfs, folder, third, job))
    assert again.total() <= 1, again
    # What is looked at before it is opened: whether the store has each layer of the image whole.
    looked = {path for command, path in asked if command == "getfileinfo"} & opened
    # None, where the bundle had all that was read.
    assert len(looked) <= 1, looked
    assert all("/store/blobs/" in path for path in looked)
