"""A process that goes on from its parent's memory is like one that was executed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.paths import REPOSITORY

_CHILD = """
import json, logging, os, signal, sys, threading

def main():
    word = sys.stdin.read()
    logging.basicConfig(format="logged: %(message)s")
    logging.warning("a word")
    print(json.dumps({
        "word": word,
        "argv": sys.argv,
        "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
        "descriptors": [
            int(name) for name in sorted(os.listdir("/proc/self/fd"))
            if os.path.islink(f"/proc/self/fd/{name}")  # but the listing's own
        ],
        "leads": os.getsid(0) == os.getpid(),
        "cwd": os.getcwd(),
        "variables": dict(os.environ),
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }))
    sys.stdout.flush()
    os.write(int(sys.argv[1]), b"reported")
    return 3
"""

_PARENT = """
import atexit, logging, os, signal, sys
from bootseer.served.forked import fork_into, may_fork
atexit.register(print, "the parent's end")
logging.basicConfig(format="not for the child's log: %(message)s")
signal.signal(signal.SIGTERM, lambda *ignored: None)
signal.signal(signal.SIGINT, lambda *ignored: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
secret = open("secret", "w+")
ours, theirs = os.pipe2(os.O_CLOEXEC)
sys.stdout.write("before; ")
assert may_fork()
with open("log", "wb") as sink:
    child = fork_into("forked_child", [str(theirs)], {"A": "b"}, sink.fileno(), theirs)
os.close(theirs)
with child.stdin:
    child.stdin.write(b"a document")
assert os.read(ours, 100) == b"reported"
assert child.wait(60) == child.wait() == 3
child.kill()
sys.stdout.write("after; ")
"""


def test_it_has_nothing_of_the_process_that_it_was(tmp_path: Path) -> None:
    (tmp_path / "forked_child.py").write_text(_CHILD)
    paths = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, "-c", _PARENT, *["secret"] * 20],
        env={"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "before; after; the parent's end\n"
    logged, told = (tmp_path / "log").read_text().splitlines()
    assert logged == "logged: a word"
    seen = json.loads(told)
    number = seen["argv"][1]
    assert seen == {
        "word": "a document",
        "argv": ["forked_child", number],
        "command": ["python", "-m", "forked_child", number],
        "descriptors": [0, 1, 2, int(number)],
        "leads": True,
        "cwd": "/",
        "variables": {"A": "b"},
        "terminate": True,
        "interrupt": True,
        "blocked": 0,
    }
