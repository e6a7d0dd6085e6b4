"""A forked worker prints the same and ends the same as an ordinary one."""

import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bootseer.served.preload.conftest import PreloadingNode

MODULES = ("argparse", "logging", "json", "multiprocessing.pool", "typing", "dataclasses", "heavy")

# Of a process: its arguments and environment, and its state.
IDENTITY = """
import sys
print(sorted(sys.modules))
import os, resource, signal
status = [line for line in open("/proc/self/status").read().splitlines()
          if line.startswith(("Umask", "Sig", "Shd", "Cap", "Groups", "NoNew", "Seccomp"))
          and not line.startswith("SigQ")]
print(sys.argv, sys.orig_argv, __name__, __file__, __spec__, sys.flags, sys.executable)
print(sys.path, os.getcwd(), [type(one) for one in sys.meta_path])
print(sorted(kv for kv in os.environ.items() if not kv[0].startswith("BOOTSEER_PRO")))
print(os.getpid() == os.getsid(0) == os.getpgrp(), status)
print([resource.getrlimit(one) for one in range(16)], os.nice(0), os.sched_getaffinity(0))
print([signal.getsignal(one) for one in range(1, 65) if one not in (32, 33)])
print(sorted(os.listdir("/proc/self/fd")), sys._getframe().f_back)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines,
          stream.line_buffering, stream.write_through, stream.seekable(), type(stream.buffer))
print(open("/proc/self/comm").read(), open("/proc/self/cmdline").read().rstrip("\\0"))
print(open("/proc/self/cgroup").read(), open("/proc/self/oom_score_adj").read())
import threading
print(threading.current_thread(), threading.main_thread().native_id == os.getpid())
"""
IMPORTS = """
import sys
print("heavy" in sys.modules, "json" in sys.modules)
import argparse, json, heavy, heavy.part, dataclasses
print(heavy.__spec__, heavy.part.__spec__.parent, heavy.made_in, heavy.part.VALUE)
print([name for name in sys.modules if name.startswith("heavy")], json.dumps(heavy.part.VALUE))
import os; print(os.environ["HEAVY"])
import importlib; importlib.reload(heavy.part); print(heavy.part.VALUE)
try:
    import heavy.missing
except ImportError as error:
    print(error, error.name)
"""
ENDS = {
    "an exception": "def f():\n    raise ValueError('no')\nf()",
    "a message": "import sys; sys.exit('gone')",
    "a code": "import sys; sys.exit(3)",
    "at once": "import os; os._exit(4)",
    "an interrupt": "raise KeyboardInterrupt",
    "a syntax error": "a b",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "at exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "a thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\nprint('soon')",
    "a failed import": "import heavy.missing",
    "another program": "import os; os.execvp('echo', ['echo', 'done'])",
    "a broken pipe": "import sys; sys.stdin.close(); print(sys.stdin.closed)",
}
MULTIPROCESSING = """
import multiprocessing, os, sys

def work(number):
    import heavy.part
    return number * heavy.part.VALUE, __name__, multiprocessing.current_process().daemon

if __name__ == "__main__":
    import heavy.part
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, range(4)))
    queue = multiprocessing.Queue(); queue.put(5); print(queue.get())
    print(len(multiprocessing.current_process().authkey))
"""


@pytest.fixture
def heavy(node: PreloadingNode) -> PreloadingNode:
    node.write(
        "modules/heavy/__init__.py",
        "import os\nmade_in = __name__\nos.environ.setdefault('HEAVY', 'set')\nprint('imported')\n",
    )
    node.write("modules/heavy/part.py", "VALUE = 7\n")
    return node


def _same(node: PreloadingNode, *words: str, **options: Any) -> tuple[str, str, int]:
    """Return a worker's output and exit code, which must be an ordinary worker's."""
    ours = node.run(*words, **options)
    assert "bootseer:" not in f"{ours.stdout}{ours.stderr}", ours
    ordinary = node.run(*words, ordinarily=True, **options)
    for mine, its in (
        (ours.stdout, ordinary.stdout),
        (ours.stderr or "", ordinary.stderr or ""),
    ):
        lines, its_lines = _comparable(mine).splitlines(), _comparable(its).splitlines()
        assert len(lines) == len(its_lines)
        pairs = zip(lines, its_lines, strict=True)
        assert [(one, other) for one, other in pairs if one != other] == []
    assert ours.returncode == ordinary.returncode
    return ours.stdout, ours.stderr or "", ours.returncode


def _comparable(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d{9,}", "N", text)


def test_what_a_process_has_is_the_same(heavy: PreloadingNode) -> None:
    heavy.write("program.py", IDENTITY)
    heavy.begin(*MODULES, "heavy", "heavy.part")
    output, _, _ = _same(heavy, "-u", "program.py", "--rate", "0.1", "ü", "")
    assert "['program.py', '--rate', '0.1', 'ü', '']" in output
    with heavy.write("input", "some lines\n").open() as file:
        _same(heavy, stdin=file, stderr=subprocess.STDOUT)
    read, write = os.pipe()
    try:
        _same(heavy, pass_fds=(read, write), umask=0o7)
    finally:
        os.close(read)
        os.close(write)
    assert "SIG_IGN" in _same(heavy, preexec_fn=_unlike)[0]


def _unlike() -> None:
    """Change everything that a launcher may have changed since the preloader began."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    # More than the tests themselves have open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1900, 2000))
    os.nice(3)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    Path("/proc/self/oom_score_adj").write_text("7", encoding="ascii")


def test_imports_are_the_same(heavy: PreloadingNode) -> None:
    heavy.write("program.py", IMPORTS)
    heavy.begin(*MODULES, "heavy.part")
    output, _, _ = _same(heavy)
    assert output.startswith("False ")
    assert output.count("imported\n") == 1


@pytest.mark.parametrize("how", ENDS)
def test_ends_are_the_same(heavy: PreloadingNode, how: str) -> None:
    heavy.write("program.py", ENDS[how])
    heavy.begin(*MODULES)
    _same(heavy)


def test_modules_and_buffered_output_are_the_same(heavy: PreloadingNode) -> None:
    heavy.write("tool/__init__.py", "print('package')")
    heavy.write("tool/train.py", IDENTITY)
    heavy.begin(*MODULES, words=("-m", "tool.train"))
    _same(heavy, "-m", "tool.train", "a")


def test_multiprocessing_is_the_same(heavy: PreloadingNode) -> None:
    heavy.write("program.py", MULTIPROCESSING)
    # A pool ends its processes before all that they print is written.
    heavy.write("modules/heavy/__init__.py", "")
    heavy.begin(*MODULES, "heavy.part")
    output, _, code = _same(heavy)
    assert (output.count("(21, '__"), code) == (3, 0)


def test_a_digest_of_the_installation_is_computed_once(node: PreloadingNode) -> None:
    node.write("modules/triton/__init__.py", "")
    node.write("modules/triton/runtime/__init__.py", "")
    node.write(
        "modules/triton/runtime/cache.py",
        "import functools, os\n@functools.lru_cache\ndef triton_key():\n    return os.getpid()\n",
    )
    node.write("program.py", "import triton.runtime.cache as c; print(c.triton_key())")
    node.begin(*MODULES, "triton", "triton.runtime", "triton.runtime.cache")
    done = node.run()
    assert (done.stdout, done.stderr) == (f"{node.preloader}\n", "")
