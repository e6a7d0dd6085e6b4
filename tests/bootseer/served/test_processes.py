"""Real processes that are started with orders, and report, die, or stay silent."""

import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError, NotFoundError, UnavailableError
from bootseer.served.processes import Role, start
from bootseer.served.service import log_path
from testbed.needs import MissingError
from testbed.paths import REPOSITORY

_CHILD = """
import os, sys, time
from bootseer.served.processes import Role, serve
from bootseer.errors import NotFoundError

def work(line, report):
    case = line.decode().split('"')[3]
    if case == "ready":
        assert report.ready()
        assert not report.ready()
    elif case == "twice":
        if (pid := os.fork()):
            os.waitpid(pid, 0)
        report.failed(NotFoundError("the first" if pid == 0 else "the second"))
    elif case == "foreign":
        raise KeyError("x")
    elif case == "half":
        os.write(3, b'{"answer": {')
    elif case == "dies":
        print("so much\\nfor that", flush=True)
    else:
        time.sleep(600)

def main():
    return serve(Role("processes_test_child", "the child"), work)

if __name__ == "__main__":
    sys.exit(main())
"""
_ROLE = Role("processes_test_child", "the child")


class _Case(Struct):
    case: str


@pytest.fixture(autouse=True)
def _child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "processes_test_child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _await(case: str, run_dir: Path, timeout_s: float = 60.0) -> None:
    with start(_ROLE, run_dir, identity="it") as process:
        process.tell(_Case(case))
        try:
            process.wait(timeout_s)
        finally:
            process.kill()


def test_a_child_says_when_it_is_ready(tmp_path: Path) -> None:
    _await("ready", tmp_path)
    assert log_path(tmp_path, "it").stat().st_mode & 0o777 == 0o600


def test_a_caller_with_many_open_files(tmp_path: Path) -> None:
    """select(2) cannot wait for descriptors above 1023."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        raise MissingError("this process may not open 1200 files")
    with contextlib.ExitStack() as stack:
        while stack.enter_context((tmp_path / "file").open("w")).fileno() < 1100:
            pass
        _await("ready", tmp_path)


def test_the_first_report_counts(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the first"):
        _await("twice", tmp_path)


def test_an_error_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the child failed: KeyError"):
        _await("foreign", tmp_path)


def test_a_death_shows_the_last_line_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="for that"):
        _await("dies", tmp_path)


def test_half_a_report_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="before it was ready: see"):
        _await("half", tmp_path)


def test_silence_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"not ready in 0\.1 s"):
        _await("silent", tmp_path, 0.1)


def test_a_log_behind_a_link_is_refused(tmp_path: Path) -> None:
    log = log_path(tmp_path, "it")
    log.parent.mkdir()
    log.symlink_to(tmp_path / "other")
    with pytest.raises(BootseerError, match="open the log"):
        start(_ROLE, tmp_path, identity="it")
    assert not (tmp_path / "other").exists()


_NEW = """
import json, logging, os, signal, sys, threading, time
from bootseer.served.processes import Ready, Role, serve

class Seen(Ready, frozen=True):
    text: str

def work(line, report):
    logging.warning("a word")
    # The process that was begun leads the session; it ends when it has become this one.
    while os.getppid() == os.getsid(0):
        time.sleep(0.01)
    report.ready(Seen(json.dumps({
        "word": line.decode(),
        "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[-2:],
        "descriptors": [
            int(name) for name in sorted(os.listdir("/proc/self/fd"))
            if os.path.islink(f"/proc/self/fd/{name}")  # but the listing's own
        ],
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "variable": os.environ.get("OURS"),
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "parent": os.getppid(),
    })))
    sys.exit(3)

def main():
    return serve(Role("processes_new", "it"), work)

if __name__ == "__main__":
    sys.exit(main())
"""

_PARENT = """
import atexit, logging, os, signal, sys
from pathlib import Path
from msgspec import Struct
from bootseer.served.processes import Role, start
class Plan(Struct):
    word: str
class Seen(Struct):
    text: str
atexit.register(print, "the parent's end")
logging.basicConfig(format="not for the child's log: %(message)s")
signal.signal(signal.SIGTERM, lambda *ignored: None)
signal.signal(signal.SIGINT, lambda *ignored: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
secret = open("secret", "w+")
os.set_inheritable(secret.fileno(), True)
sys.stdout.write("before; ")
with start(Role("processes_new", "it"), Path("run").absolute(), identity="it",
           copy=sys.argv[1] == "copy", variables={} if sys.argv[1] == "copy" else {"OURS": None},
           ) as process:
    process.tell(Plan("a document"))
    print(process.pid)
    print(process.wait(60, Seen).text)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    sys.stdout.write("after; ")
"""


@pytest.mark.parametrize("how", ["copy", "interpreter"])
def test_it_has_nothing_of_the_process_that_began_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "processes_new.py").write_text(_NEW)
    # Modules in the caller's working directory are not loaded.
    (here := tmp_path / "here").mkdir()
    (here / "logging.py").write_text("raise SystemExit(9)")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PARENT, how, *["secret"] * 20],
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OURS": "b"},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    begun, told, end = done.stdout.splitlines()
    assert end == "after; the parent's end"
    seen = json.loads(told)
    assert seen.pop("parent") != int(begun.removeprefix("before; "))
    assert log_path(here / "run", "it").read_text().endswith("WARNING a word\n")
    assert seen == {
        "word": '{"word": "a document"}\n',
        "command": ["-m", "processes_new"],
        "descriptors": [0, 1, 2, 3],
        "session": int(begun.removeprefix("before; ")),
        "cwd": "/",
        "variable": "b" if how == "copy" else None,
        "terminate": True,
        "interrupt": True,
        "blocked": 0,
    }
