"""A server's process, seen from who starts it: from its begin to its report that it serves.

Alone owns the two steps: `begin_server` when it is clear that there will be a server, which loads
its code beside whatever else a start has to do; `ServerProcess.serve` when it is clear what it will
serve. A program of ours may do the first before it knows its settings: `begin_ahead`. Light, since
whoever starts a server waits for what is loaded here. One thread per process.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from bootseer.errors import BootseerError, DeadlineError
from bootseer.linux.private_files import private_directory
from bootseer.linux.waiting import wait_ended
from bootseer.served import background
from bootseer.served.forked import may_fork

START_S = 30.0
_DEVICE = "/dev/fuse"
_ahead: tuple[str, background.Starting] | None = None
"""Begun by `begin_ahead`, for the first who begins a server of this module."""


class ServerProcess:
    """A process that waits to be told what to serve. A `with` block ends it unless it was."""

    def __init__(self, identity: str, starting: background.Starting, what: str) -> None:
        self.identity = identity
        """Of the mount that it will serve."""
        self._starting: background.Starting | None = starting
        self._what = what

    def serve(self, document: str, timeout_s: float = START_S) -> None:
        """Hand it its plan, once, and `wait`."""
        self.hand(document)
        self.wait(timeout_s)

    def hand(self, document: str) -> None:
        """Hand it its plan, once: it prepares what it can until `go`. Then `wait`."""
        assert self._starting is not None
        try:
            self._starting.hand_line(document)
        except BaseException:
            self.abandon()
            raise

    def go(self) -> None:
        """What its plan says is there. Idempotent, once it was handed that."""
        if self._starting is not None:
            self._starting.end_input()

    def wait(self, timeout_s: float = START_S) -> None:
        """Once it was handed its plan: `go`, and it serves when this returns, as nobody's child.

        Raises: what it reported, DeadlineError, UnavailableError.
        """
        self.go()
        starting, self._starting = self._starting, None
        assert starting is not None
        with starting:
            try:
                if not wait_ended(starting.process.pid, timeout_s):
                    raise DeadlineError(f"{self._what} did not start in {timeout_s:g} s")
            finally:
                # Nothing where it has ended, as it should.
                starting.process.kill()
                starting.process.wait()
            starting.await_ready(timeout_s)

    def abandon(self) -> None:
        """End it, if it was not told to serve anything. Idempotent; never raises."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(OSError):
                starting.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


def may_mount() -> bool:
    """Whether this process can mount anything by itself."""
    return os.geteuid() == 0 and os.access(_DEVICE, os.R_OK | os.W_OK)


def begin_ahead(module: str, load: Callable[[], object]) -> None:
    """Begin the server of `module` that `begin_server` will give first: a copy of this process,
    which loads its code while this one finds out what it was asked for. `load` brings what both
    need. Nothing where that cannot be.

    Only for a program of ours, at its beginning.
    """
    global _ahead
    if may_mount() and may_fork():
        load()
        with contextlib.suppress(BootseerError):
            starting = background.begin(module, what="the server", log=None, forks=True)
            _ahead = module, starting


def is_begun_ahead() -> bool:
    """Whether `begin_server` has one to give."""
    return _ahead is not None


def end_ahead() -> None:
    """Nobody will begin a server. Idempotent; never raises."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None:
        with contextlib.suppress(OSError):
            ahead[1].abandon()


def begin_server(
    run_dir: Path, module: str, what: str, *, identity: str | None = None, forks: bool = False
) -> ServerProcess:
    """Start a process that will serve a mount, by default one that nobody has named yet, through
    `module`, whose `main` is `life.run_server`. Then `serve` or `abandon` it.

    `what` names the process in messages. `forks`: as `background.begin` has it. What `begin_ahead`
    began is as good as a new one. Raises: BootseerError.
    """
    global _ahead
    from bootseer.served.folders import log_path, new_identity

    identity = identity or new_identity()
    log = log_path(run_dir, identity)
    private_directory(log.parent)
    if _ahead is not None and _ahead[0] == module:
        starting, _ahead = _ahead[1], None
        # It opens it itself, once it is told what to serve.
        starting.log = log
    else:
        starting = background.begin(module, what=what, log=log, append=True, forks=forks)
    return ServerProcess(identity, starting, what)
