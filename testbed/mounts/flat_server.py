"""Serves a flat directory from a process of its own, for tests that kill or stop servers.

    python -m testbed.mounts.flat_server HOW SOURCE MOUNTPOINT MODE
        [SHUTDOWN_S [KERNEL_DEADLINE_S [WORKER_SILENCE_S [STOP_GRACE_S]]]]

HOW is serve, supervise, or supervise-always (which never gives up). Prints "ready" when the mount
works and "ended" when it ended as it should. The environment variable BOOTSEER_TEST_KERNEL names
the Linux release whose features the mount has, if not those of the running one (testbed.kernels).
"""

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from bootseer.fuse.kernel.dispatch import Dispatcher
from bootseer.fuse.kernel.operations import Buffer, Caller
from bootseer.served.supervision.supervisor import supervise
from bootseer.served.supervision.worker import RestartPolicy
from testbed.kernels import offer_as
from testbed.mounts.flat_directory import FlatDirectory, Mode
from testbed.mounts.fuse_mount import short_options
from testbed.mounts.serving import serve

KERNEL = "BOOTSEER_TEST_KERNEL"


class Crashing(FlatDirectory):
    """Dies at every read of the file "crash". Where there is a folder "stick-once", it takes that
    away at the first read, and then waits for itself: it stores pages that it has not brought."""

    def __init__(self, root: Path, mode: Mode) -> None:
        super().__init__(root, mode)
        self._order = root / "stick-once"

    def read(self, caller: Caller, node: int, handle: int, offset: int, length: int) -> Buffer:
        if self._names[node - 2] == b"crash":
            os._exit(9)
        if self._order.exists():
            self._order.rmdir()
            assert self.store_pages is not None
            # What is right: the kernel may take it after what the successor brings.
            self.store_pages(node, 0, b"small")
        data = super().read(caller, node, handle, offset, length)
        assert isinstance(data, memoryview)
        return data


def _fail(*arguments: object) -> NoReturn:
    raise RuntimeError("a bug in the server")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the end."""
    logging.basicConfig(level=logging.INFO)
    if release := os.environ.get(KERNEL):
        offer_as(release)
    how, source, mountpoint, mode = sys.argv[1:5]
    shutdown_s = float(sys.argv[5]) if len(sys.argv) > 5 else 5.0
    kernel_deadline_s = int(sys.argv[6]) if len(sys.argv) > 6 else 600
    worker_silence_s = float(sys.argv[7]) if len(sys.argv) > 7 else 6.0
    stop_grace_s = float(sys.argv[8]) if len(sys.argv) > 8 else 15.0
    options = short_options(
        read_only=True,
        passthrough=mode == Mode.PASSTHROUGH,
        shutdown_s=shutdown_s,
        kernel_deadline_s=kernel_deadline_s,
        worker_silence_s=worker_silence_s,
    )

    def factory() -> FlatDirectory:
        # A fault of the server itself, in the first process only.
        order = Path(source, "fail-once")
        if order.exists():
            order.unlink()
            Dispatcher.answer = _fail  # type: ignore[method-assign, assignment]
        return Crashing(Path(source), Mode(mode))

    if how.startswith("supervise"):
        # A window of no length forgets every death at once.
        restart = RestartPolicy(window_s=0.0) if how == "supervise-always" else None
        supervise(
            lambda attached: factory(),
            Path(mountpoint),
            options,
            on_ready=lambda: _say("ready"),
            restart=restart,
            stop_grace_s=stop_grace_s,
        )
    else:
        serve(factory(), Path(mountpoint), options, on_ready=lambda: _say("ready"))
    _say("ended")


if __name__ == "__main__":
    main()
