"""Input at a terminal reaches the program behind any parents."""

import contextlib
import os
import pty
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux.processes import wait_readable

# Prints each line of its input; SIGQUIT and the launcher's last signal end it.
PROGRAM = """
import os, signal, sys, time
import large

def told(number, frame):
    print("told", signal.Signals(number).name, flush=True)
    if number != signal.SIGINT or "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit(7)

for name in ("SIGINT", "SIGQUIT", "SIGTERM"):
    signal.signal(getattr(signal, name), told)
parent = open(f"/proc/{os.getppid()}/comm").read().strip()
print("below", parent, os.isatty(0), flush=True)
if "--ends" in sys.argv:
    sys.exit(0)
end = time.monotonic() + 100
while time.monotonic() < end:
    time.sleep(0.05)
"""


class _Terminal:
    """Terminal of its own with `bootseer run --preload` in the foreground."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environ = {
                **{name: one for name, one in os.environ.items() if name != "PYTHONPATH"},
                "PYTHONUSERBASE": str(folder),
                "PYTHONPATH": str(folder / "lib"),
                "BOOTSEER_TIMELINE_DIR": str(folder / "timeline"),
                "BOOTSEER_STORE": str(folder / "store"),
                "BOOTSEER_CACHE_DIR": str(folder / "cache"),
                "BOOTSEER_RUN_DIR": str(folder / "run"),
                "BOOTSEER_JOB": "j",
            }
            words = [sys.executable, "-m", "bootseer", "run", "--set", "keep_caches=off"]
            os.execve(sys.executable, [*words, *command], environ)

    def read_until(self, text: str) -> None:
        end_s = time.monotonic() + 100
        while text not in self.text:
            assert time.monotonic() < end_s, self.text
            if wait_readable([self._terminal], 1.0):
                try:
                    self.text += os.read(self._terminal, 4096).decode(errors="replace")
                except OSError:  # the terminal's other side is gone
                    assert text in self.text, self.text

    def type(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def wait(self) -> int:
        end_s = time.monotonic() + 100
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                if wait_readable([self._terminal], 0.05):
                    self.text += os.read(self._terminal, 4096).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(self.text)

    def end(self) -> None:
        if self.pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@contextlib.contextmanager
def _terminal(folder: Path, *command: str) -> Iterator[_Terminal]:
    terminal = _Terminal(folder, *command)
    try:
        yield terminal
    finally:
        terminal.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/large.py").write_text("import time; time.sleep(0.15); x = 5")
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_at_a_terminal_is_its_foreground(folder: Path) -> None:
    """The program starts ordinarily, since a fork could not have the terminal."""
    command = ("--preload", "--", sys.executable, "-u", "train.py")
    with _terminal(folder, *command, "--ends") as first:
        assert first.wait() == 0, first.text
    with _terminal(folder, *command) as terminal:
        terminal.read_until(" True")
        assert "without the preloader: only the leader of a session" in terminal.text
        terminal.type(b"\x03")
        terminal.read_until("told SIGINT")
        terminal.type(b"\x1c")
        terminal.read_until("told SIGQUIT")
        assert terminal.wait() == 7


@pytest.mark.needs(modules=["torch"])
@pytest.mark.timeout(400)
def test_workers_of_a_torchrun_at_a_terminal_are_told_alike(folder: Path) -> None:
    torchrun = ("--", sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py")
    outcomes = []
    with _terminal(folder, "--preload", *torchrun, "--ends") as first:
        assert first.wait() == 0, first.text
    for options, is_forked in (("--set=linger=off", False), ("--preload", True)):
        with _terminal(folder, options, *torchrun) as terminal:
            terminal.read_until("below ")
            terminal.read_until(" True")
            terminal.type(b"\x03")
            terminal.read_until("told ")
            code = terminal.wait()
            assert ("below bootseer-guard" in terminal.text) == is_forked, terminal.text
            outcomes.append((terminal.text.split("told ")[1].split()[0], code))
    assert outcomes[0] == outcomes[1]
