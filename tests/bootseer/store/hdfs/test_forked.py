"""Forked children of a process that has used an HDFS."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.hdfs
def test_garbage_of_the_parent_holds_no_child(hdfs_url: str) -> None:
    """A runtime of hdfs-native that a child frees waits for threads that exist only in the
    parent."""
    done = subprocess.run(
        [sys.executable, "-c", _GARBAGE, hdfs_url], env=os.environ, timeout=120, check=False
    )
    assert done.returncode == 0


_ASKING = """
import os, signal, socket, sys, threading
from bootseer.store import open_backend

server = socket.create_server(("127.0.0.1", 0))
backend = open_backend(f"hdfs://127.0.0.1:{server.getsockname()[1]}/x?deadline_s=1")
threading.Thread(target=backend.can_join).start()
connection, _ = server.accept()
pid = os.fork()
if not pid:
    signal.alarm(60)
    os._exit(backend.can_join())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_child_asks_by_itself_what_its_parent_is_asking() -> None:
    """The child once waited for ever for a lock that a thread of its parent held at the fork."""
    done = subprocess.run([sys.executable, "-c", _ASKING], timeout=120, check=False)
    assert done.returncode == 0


_KEPT_OPEN = """
import os, signal, sys
from bootseer.store import open_backend
from bootseer.transfer.attempt import Attempt

backend = open_backend(sys.argv[1])
with backend.create("file") as writer:
    writer.write(bytes(range(256)) * 1000)
reader = backend.open_reader("file")

def read():
    buffer = bytearray(1000)
    assert reader.read_into(256, memoryview(buffer), Attempt()) == 1000
    assert buffer == (bytes(range(256)) * 4)[:1000]

read()
pid = os.fork()
if not pid:
    signal.alarm(60)
    read()
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
read()
sys.exit(code)
"""


@pytest.mark.hdfs
def test_a_child_reads_on_from_a_file_that_is_kept_open(hdfs_url: str) -> None:
    """The child once waited for ever for threads of hdfs-native that exist only in the parent."""
    done = subprocess.run(
        [sys.executable, "-c", _KEPT_OPEN, hdfs_url], env=os.environ, timeout=120, check=False
    )
    assert done.returncode == 0
