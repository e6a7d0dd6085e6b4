"""A server's process from its first instruction to its report that it serves.

Alone owns the two steps: `begin_server` when it is clear that there will be a server, which loads
its code beside whatever else a start has to do; `serve` when it is clear what it will serve. A
program of ours may do the first before it knows its settings: `begin_ahead`. Light, since whoever
starts a server waits for what is loaded here. One thread per process.
"""

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from bootseer.errors import BootseerError, DeadlineError
from bootseer.linux.private_files import private_directory
from bootseer.linux.waiting import wait_ended
from bootseer.served import background
from bootseer.served.forked import may_fork
from bootseer.settings.config import Settings

_START_S = 30.0
_MODULE = "bootseer.prefetch.serve.server"
_WHAT = "the image's server"
_DEVICE = "/dev/fuse"
_ahead: background.Starting | None = None
"""Begun by `begin_ahead`, for the first who begins a server."""


def new_identity() -> str:
    """Of a mount that is about to be made."""
    return os.urandom(8).hex()


def log_path(settings: Settings, identity: str) -> Path:
    """The log of a mount's server and of what it starts."""
    return settings.run_dir / "logs" / f"{identity}.log"


class ServerProcess:
    """A process that waits to be told what to serve. A `with` block ends it unless it was."""

    def __init__(self, identity: str, starting: background.Starting, what: str) -> None:
        self.identity = identity
        """Of the mount that it will serve."""
        self._starting: background.Starting | None = starting
        self._what = what

    def serve(self, document: str) -> None:
        """Hand it its plan, once, and `wait`."""
        self.hand(document)
        self.wait()

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

    def wait(self) -> None:
        """Once it was handed its plan: `go`, and it serves when this returns, as nobody's child.

        Raises: what it reported, DeadlineError, UnavailableError.
        """
        self.go()
        starting, self._starting = self._starting, None
        assert starting is not None
        with starting:
            try:
                if not wait_ended(starting.process.pid, _START_S):
                    raise DeadlineError(f"{self._what} did not start in {_START_S:g} s")
            finally:
                # Nothing where it has ended, as it should.
                starting.process.kill()
                starting.process.wait()
            starting.await_ready(_START_S)

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


def begin_ahead() -> None:
    """Begin the server that `begin_server` will give first: a copy of this process, which loads its
    code while this one finds out what it was asked for. Nothing where that cannot be.

    Only for a program of ours, at its beginning.
    """
    global _ahead
    if may_mount() and may_fork():
        _load_what_both_need()
        with contextlib.suppress(BootseerError):
            _ahead = background.begin(_MODULE, what=_WHAT, log=None, forks=True)


def _load_what_both_need() -> None:
    """Once for this process and its copy, which waits for no less than we do: a third of all that
    they load. Anything more would keep the two from loading side by side."""
    import bootseer.prefetch.cache.kept_indexes
    import bootseer.prefetch.mounts.start_server  # noqa: F401
    from bootseer.store import load_backend

    # Nobody has told us the store yet; mostly this is it.
    load_backend(os.environ.get("BOOTSEER_STORE", ""))


def is_begun_ahead() -> bool:
    """Whether `begin_server` has one to give."""
    return _ahead is not None


def end_ahead() -> None:
    """Nobody will begin a server. Idempotent; never raises."""
    global _ahead
    starting, _ahead = _ahead, None
    if starting is not None:
        with contextlib.suppress(OSError):
            starting.abandon()


def begin_server(
    settings: Settings,
    *,
    identity: str | None = None,
    module: str = _MODULE,
    what: str = _WHAT,
    forks: bool = False,
) -> ServerProcess:
    """Start a process that will serve a mount, by default one that nobody has named yet, through
    `module`, whose `main` forks once it has its plan. Then `serve` or `abandon` it. `forks`: as
    `background.begin` has it. What `begin_ahead` began is as good as a new one.

    Raises: BootseerError.
    """
    global _ahead
    identity = identity or new_identity()
    log = log_path(settings, identity)
    private_directory(log.parent)
    starting = None
    if module == _MODULE:
        starting, _ahead = _ahead, None
    if starting is not None:
        # It opens it itself, once it is told what to serve.
        starting.log = log
    else:
        starting = background.begin(module, what=what, log=log, append=True, forks=forks)
    return ServerProcess(identity, starting, what)
