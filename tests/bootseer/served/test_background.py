"""Real processes that report, die without a word, or say nothing."""

import contextlib
import resource
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, DeadlineError, NotFoundError, UnavailableError
from bootseer.served.background import begin
from testbed.needs import MissingError

_CHILD = """
import os, sys, time
from bootseer.served.background import Report
from bootseer.errors import NotFoundError
report = Report(int(sys.argv[1]), "the child")
case = sys.stdin.read().strip()
if case == "ready":
    assert report.send_ready()
    assert not report.send_ready()
elif case == "twice":
    if (pid := os.fork()):
        os.waitpid(pid, 0)
    report.send_error(NotFoundError("the first" if pid == 0 else "the second"))
elif case == "foreign":
    report.send_error(KeyError("x"))
elif case == "half":
    os.write(int(sys.argv[1]), b'{"ready": true')
elif case == "dies":
    sys.exit("so much\\nfor that")
else:
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "background_test_child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _await(case: str, log: Path, timeout_s: float = 60.0) -> None:
    with begin("background_test_child", "the child", log) as process:
        process.serve(case, timeout_s)


def test_a_child_says_when_it_is_ready(tmp_path: Path) -> None:
    _await("ready", tmp_path / "log")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_caller_with_many_open_files(tmp_path: Path) -> None:
    """select(2) cannot wait for descriptors above 1023."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        raise MissingError("this process may not open 1200 files")
    with contextlib.ExitStack() as stack:
        while stack.enter_context((tmp_path / "log").open("w")).fileno() < 1100:
            pass
        _await("ready", tmp_path / "log")


def test_the_first_report_counts(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="the first"):
        _await("twice", tmp_path / "log")


def test_an_error_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="the child failed: KeyError"):
        _await("foreign", tmp_path / "log")


def test_a_death_shows_the_last_line_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="for that"):
        _await("dies", tmp_path / "log")


def test_half_a_report_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="before it was ready: see"):
        _await("half", tmp_path / "log")


def test_silence_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"not ready in 0\.1 s"):
        _await("silent", tmp_path / "log", 0.1)


def test_a_log_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "other")
    with pytest.raises(BootseerError, match="open the log"):
        begin("background_test_child", "the child", tmp_path / "log")
    assert not (tmp_path / "other").exists()
