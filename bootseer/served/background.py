"""Processes that serve in the background: started with a document, they report once how it went.

Alone owns that exchange, both sides of it. `begin` runs `python -m MODULE REPORT_FD`, and `hand`
gives it the document on its standard input, never on a command line: it may hold credentials. Both
apart let the interpreter load while the document is still being made. The process makes
a `Report` of the descriptor, says "ready" or why not, and goes on without whoever started it. Edge
module; a `Starting` belongs to one thread.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bootseer
from bootseer.base.closing import Closing
from bootseer.errors import DeadlineError, UnavailableError, from_oserror
from bootseer.linux.private_files import private_opener
from bootseer.linux.waiting import wait_readable
from bootseer.served.forked import Forked, fork_into, may_fork
from bootseer.served.json_errors import error_from_json, error_to_json

_REPORT_BYTES_MAX = 1 << 16
_LOG_TAIL_BYTES = 2000
# What a process that could not start may take to clean up.
_FAILED_END_S = 15.0


class Starting(Closing):
    """A process from its start to its report. Leaving a `with` block closes the pipe only."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | Forked",
        report_fd: int,
        what: str,
        log: Path,
    ) -> None:
        self.log = log
        """Where its last words are looked for."""
        self.process = process
        self._report_fd = report_fd
        self._what = what

    def hand(self, document: str) -> None:
        """Give the process its document, once. It must fit into a pipe (64 KiB)."""
        self._write(document)
        self.end_input()

    def hand_line(self, document: str) -> None:
        """As `hand`, for a process that begins with a line, and goes on at `end_input`."""
        self._write(document + "\n")

    def _write(self, text: str) -> None:
        assert self.process.stdin is not None
        # Its report, or the lack of one, tells more than the broken pipe.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def end_input(self) -> None:
        """The process has been handed all there is. Idempotent."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def abandon(self) -> None:
        """Kill the process, and close its pipe. Idempotent."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.close()

    def close(self) -> None:
        """Let the process go on alone. Idempotent."""
        fd, self._report_fd = self._report_fd, -1
        if fd >= 0:
            os.close(fd)

    def await_ready(self, timeout_s: float) -> None:
        """Until the process says that it serves.

        Raises: what the process reported instead; UnavailableError when it ended without a word;
        DeadlineError.
        """
        # Several processes may report one failure: the first is nearest to the cause.
        line = self._read(timeout_s).partition(b"\n")[0]
        document: Mapping[str, Any] = json.loads(line) if line else {}
        if document.get("ready"):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_FAILED_END_S)
        if "error" in document:
            raise error_from_json(document)
        raise UnavailableError(f"{self._what} ended before it was ready: {self._last_words()}")

    def _read(self, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        data = b""
        while b"\n" not in data and len(data) < _REPORT_BYTES_MAX:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not wait_readable([self._report_fd], left_s):
                raise DeadlineError(
                    f"{self._what} was not ready in {timeout_s:g} s; see {self.log}"
                )
            piece = os.read(self._report_fd, _REPORT_BYTES_MAX)
            if not piece:
                # Killed in the middle of a line: it has said nothing.
                return b""
            data += piece
        return data

    def _last_words(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES, 0))
                tail = file.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            tail = ""
        return f"{self.log}: {tail}" if tail else f"see {self.log}"


def start(module: str, document: str, *, what: str, log: Path, append: bool = False) -> Starting:
    """`begin` and `hand` in one. Raises: BootseerError; no process is left then."""
    starting = begin(module, what=what, log=log, append=append)
    try:
        starting.hand(document)
    except BaseException as error:
        starting.abandon()
        if isinstance(error, OSError):
            raise from_oserror(error, f"start {what}") from error
        raise
    return starting


def begin(
    module: str, *, what: str, log: Path | None, append: bool = False, forks: bool = False
) -> Starting:
    """Start `module` in a session of its own; its output goes to the file `log`, or nowhere until
    it calls `write_to`. It waits for its document, and ends when it gets none because we have
    ended.

    `what` names the process in messages. `forks`: it may be a copy of this one (see `forked`).
    Raises: BootseerError; no process is left then.
    """
    log = log or Path(os.devnull)
    try:
        sink = open(log, "ab" if append else "wb", opener=private_opener)  # noqa: SIM115
    except OSError as error:
        raise from_oserror(error, f"open the log {log}") from error
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        process: subprocess.Popen[bytes] | Forked
        if forks and may_fork():
            process = fork_into(module, [str(theirs)], python_environment(), sink.fileno(), theirs)
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                pass_fds=[theirs],
                start_new_session=True,
                env=python_environment(),
                cwd="/",
            )
    except BaseException as error:
        os.close(ours)
        if isinstance(error, OSError):
            raise from_oserror(error, f"start {what}") from error
        raise
    finally:
        os.close(theirs)
        sink.close()
    return Starting(process, ours, what, log)


def write_to(log: Path) -> None:
    """The process's side: what it prints goes to the end of the file `log` from now on.

    Raises: BootseerError.
    """
    try:
        with open(log, "ab", opener=private_opener) as sink:
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
    except OSError as error:
        raise from_oserror(error, f"open the log {log}") from error


class Report:
    """The process's side: one message to whoever started it; later ones go nowhere. A fork has a
    copy of its own."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd = fd
        self._what = what
        if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            # Ignored by whoever started us. A server that does so cannot be told to end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def send_ready(self) -> bool:
        """False when who started us is gone, or has been told something before."""
        return self._send({"ready": True})

    def send_error(self, error: BaseException) -> None:
        """So that the other side raises the same. Never raises."""
        self._send(error_to_json(error, self._what))

    def _send(self, document: Mapping[str, Any]) -> bool:
        try:
            os.write(self._fd, json.dumps(document).encode() + b"\n")
        except OSError:
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def python_environment() -> dict[str, str]:
    """Our environment, so that a new interpreter finds this very Bootseer, wherever it runs."""
    source = str(Path(bootseer.__file__).parent.parent)
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
