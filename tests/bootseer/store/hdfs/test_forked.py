"""Children that are forked from a process which has used an HDFS."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.hdfs

_GARBAGE = """
import gc, os, signal, sys
from bootseer.store import open_backend

gc.disable()
backend = open_backend(sys.argv[1])
kept = [backend.create("file")]
kept[0].write(bytes(100_000))
# Of a client that was closed something is left in a circle, as of an exception's frames.
kept.append(kept)
backend.close()
del kept, backend
pid = os.fork()
if not pid:
    signal.alarm(60)
    gc.collect()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_garbage_of_the_parent_holds_no_child(hdfs_url: str) -> None:
    """A runtime of hdfs-native that a child frees waits for threads that stayed in the parent."""
    done = subprocess.run(
        [sys.executable, "-c", _GARBAGE, hdfs_url], env=os.environ, timeout=120, check=False
    )
    assert done.returncode == 0
