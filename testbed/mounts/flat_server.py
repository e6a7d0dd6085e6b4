"""Serves a flat directory from a process of its own, for tests that kill or stop servers.

    python -m testbed.mounts.flat_server HOW SOURCE MOUNTPOINT MODE
        [SHUTDOWN_S [KERNEL_DEADLINE_S [WORKER_SILENCE_S [STOP_GRACE_S]]]]

HOW is serve, supervise, or supervise-always (which never gives up). Prints "ready" when the mount
works and "ended" after a clean end. The environment variable BOOTSEER_TEST_KERNEL names a Linux
release to whose features the mount is limited (testbed.kernels).
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from bootseer.fuse.kernel.dispatch import Dispatcher
from bootseer.fuse.kernel.operations import Buffer, Caller
from bootseer.fuse.kernel.server import FuseServer
from bootseer.served.supervision.heartbeat import Heartbeat
from bootseer.served.supervision.supervisor import RestartPolicy, supervise
from testbed.kernels import offer_as
from testbed.mounts.flat_directory import FlatDirectory, OpenMode
from testbed.mounts.fuse_mount import short_options
from testbed.mounts.serving import serve

KERNEL = "BOOTSEER_TEST_KERNEL"


class CrashingDirectory(FlatDirectory):
    """`FlatDirectory` that exits at every read of the file "crash".

    If there is a folder "stick-once", the next read removes it and then hangs: it stores pages in
    the kernel while the kernel waits for them. With a file "stop-once", the next worker stops as
    soon as it has said that it serves. With a file "wait-once", the next worker's main thread waits
    for SIGTERM as soon as the worker serves, before the worker has said so.
    """

    def __init__(self, root: Path, mode: OpenMode) -> None:
        super().__init__(root, mode)
        self._order = root / "stick-once"

    def read(self, caller: Caller, node: int, handle: int, offset: int, length: int) -> Buffer:
        if self._names[node - 2] == b"crash":
            os._exit(9)
        if self._order.exists():
            self._order.rmdir()
            assert self.store_pages is not None
            # The right content: the kernel may use it after the restarted server has answered.
            self.store_pages(node, 0, b"small")
        data = super().read(caller, node, handle, offset, length)
        assert isinstance(data, memoryview)
        return data


def _fail(*arguments: object) -> NoReturn:
    raise RuntimeError("a bug in the server")


def _answer_stopped(heartbeat: Heartbeat, stop: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    _answer_until(heartbeat, stop)


_answer_until = Heartbeat.answer_until


def _start_and_wait(server: FuseServer, *, resend: bool) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    _start(server, resend=resend)
    signal.sigwait([signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


_start = FuseServer.start


def _is_ordered(source: str, fault: str) -> bool:
    """Return whether a test has ordered the fault by a file, and remove the file."""
    order = Path(source, fault)
    if not order.exists():
        return False
    order.unlink()
    return True


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
        passthrough=mode == OpenMode.PASSTHROUGH,
        shutdown_s=shutdown_s,
        kernel_deadline_s=kernel_deadline_s,
        worker_silence_s=worker_silence_s,
    )

    def factory() -> FlatDirectory:
        # Faults of the server itself, each in one process only.
        if _is_ordered(source, "fail-once"):
            Dispatcher.answer = _fail  # type: ignore[method-assign, assignment]
        if _is_ordered(source, "stop-once"):
            Heartbeat.answer_until = _answer_stopped  # type: ignore[method-assign, assignment]
        if _is_ordered(source, "wait-once"):
            FuseServer.start = _start_and_wait  # type: ignore[method-assign, assignment]
        return CrashingDirectory(Path(source), OpenMode(mode))

    if how.startswith("supervise"):
        # With a window of no length, no restart counts.
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
