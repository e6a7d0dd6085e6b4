"""Supervisor of a mount, which survives the death of the process that serves it.

The supervisor mounts, holds the /dev/fuse descriptor, and forks a worker that serves. When the
worker dies, another one takes over and makes the kernel repeat the requests without an answer
(FUSE_NOTIFY_RESEND, protocol 7.40): readers notice only a pause. If the kernel cannot do that, or
workers keep dying, the connection is aborted, so that readers get an error and do not hang. If the
supervisor itself is killed, the worker serves on until the mount is unmounted.

After a stop signal the mount leaves its path at once, and programs have `MountOptions.shutdown_s`
to close their open files. A worker that dies in this time is replaced as well, so that they can.

A worker that runs but does not answer (stopped, or frozen with its cgroup; see `heartbeat`) gets
SIGCONT; if that does not help it is killed and replaced like one that died. If the supervisor is
stopped or frozen as well, readers wait until both go on, or until the kernel gives up
(`MountOptions.kernel_deadline_s`).

A worker that exits with `HANDED_OVER` asks to be replaced, perhaps by newer code: `hand_over` may
then replace this process by one that calls `supervise` with the same `Attached`.

Rules for `Operations` under supervision: node ids, handles and directory cookies mean the same in
every worker, so they are derived without state of the process (the image tree: node = inode number
+ 1, handle 0) or journalled before the kernel gets them (the striped file system). A request may
run twice, so a request that changes something must allow repetition. `read` must return bytes that
are resident, not a view of a mapped file: a page fault after the worker was killed in the middle of
its reply makes that request fail with EIO.

Only this module forks. The supervisor stays single-threaded, and imports nothing heavy.
"""

import contextlib
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.errors import BootseerError, InvalidInputError, UnavailableError
from bootseer.fuse.kernel import control
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached, FuseServer, attach
from bootseer.fuse.kernel.unmount import abort_connection, detach
from bootseer.linux.processes import is_stuck, reap, wait_readable
from bootseer.served.processes import Ready, Report
from bootseer.served.supervision.heartbeat import Heartbeat

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Factory = Callable[[Attached], Operations]
"""Makes the operations of one worker; called in the worker."""
HANDED_OVER = 75  # EX_TEMPFAIL of sysexits.h
_WORKER_FAILED = 70  # EX_SOFTWARE of sysexits.h
# What a worker says to its supervisor: from now on a request may be answered; the mount works.
_BEGINS, _SERVES = b"b", b"s"
_STUCK_S = 1.0
"""Time for a killed process to end, unless a thread of it waits in the kernel."""
_READY_DEADLINE_S = 120.0
_STOP_GRACE_S = 15.0
_CONTINUE_SHARE = 0.5
"""Share of the allowed silence after which a worker gets SIGCONT."""
_CANNOT_REPLACE_FACTOR = 4.0
"""Factor for the allowed silence of a worker whose end is the mount's end."""


class StopSignal:
    """Descriptor that becomes readable on SIGTERM or SIGINT. Main thread only.

    The handler writes to an eventfd and takes no lock, since it may interrupt code that holds one.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        for number in STOP_SIGNALS:
            # A shell ignores SIGINT for its background jobs: keep that.
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        event, self._event = self._event, -1
        os.close(event)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.wake()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._event

    def wake(self) -> None:
        """Make the descriptor readable, as a signal does."""
        if self._event >= 0:
            os.eventfd_write(self._event, 1)


class RestartPolicy:
    """Limit on worker deaths: at most `limit` in `window_s`, with growing pauses."""

    def __init__(self, limit: int = 5, window_s: float = 10.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._deaths: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Record a death at `now_s`. Return the pause before a restart; None: no restart."""
        while self._deaths and now_s - self._deaths[0] > self._window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        count = len(self._deaths)
        if count > self._limit:
            return None
        # A single crash costs nothing; a worker that dies at its start does not spin.
        return 0.0 if count == 1 else min(0.05 * 2.0 ** (count - 2), 1.0)


def supervise(
    factory: Factory,
    mountpoint: Path,
    options: MountOptions,
    *,
    report: Report | None = None,
    answer: Callable[[], Struct] = Ready,
    on_ready: Callable[[], None] = lambda: None,
    restart: RestartPolicy | None = None,
    attached: Attached | None = None,
    hand_over: Callable[[Attached], None] | None = None,
    stop_grace_s: float = _STOP_GRACE_S,
) -> None:
    """Mount `mountpoint`, and serve it from worker processes until unmounted, SIGTERM or SIGINT.

    When the first worker serves, `report` gets `answer()` and `on_ready` is called, in this
    process; a failure is reported instead. Main thread of a single-threaded process only.

    Args:
        factory: Makes the file system's operations; called in each worker, after the fork.
        mountpoint: Where to mount.
        options: Options of the mount.
        report: Report to the process that started this one.
        answer: Makes the report's answer.
        on_ready: Called when the first worker serves.
        restart: How often a worker may die.
        attached: A mount that another process of ours has made; the kernel repeats its requests.
        hand_over: Called with blocked stop signals after a worker has exited with `HANDED_OVER`; if
            it returns, this code goes on serving.
        stop_grace_s: Time for a worker to end after `shutdown_s` before it is killed.

    Raises:
        InvalidInputError: This process has other threads.
        BootseerError: The mount failed.
        UnavailableError: The first worker did not start, workers kept dying, or the reader of the
            report has gone.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise InvalidInputError(
            f"supervise() forks, but this process has {threads} threads: call it before anything "
            "starts threads, or in a process of its own"
        )
    with StopSignal() as stop:
        # The process that handed over has blocked them until there are handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        is_taken_over = attached is not None
        attached = attached or attach(mountpoint, options)
        try:
            # Opened while mounted: after an unmount another mount may get the number.
            with control.connection(attached.device_minor) as connection:
                policy = restart or RestartPolicy()
                supervisor = _Supervisor(
                    factory,
                    options,
                    attached,
                    connection,
                    stop,
                    policy,
                    hand_over,
                    report,
                    answer,
                    stop_grace_s,
                )
                supervisor.run(on_ready, is_taken_over)
        finally:
            os.close(attached.device)


class _Supervisor(Struct):
    factory: Factory
    options: MountOptions
    attached: Attached
    connection: control.LiveConnection | None
    stop: StopSignal
    restart: RestartPolicy
    hand_over: Callable[[Attached], None] | None
    report: Report | None
    answer: Callable[[], Struct]
    stop_grace_s: float
    worker: int = -1
    """Process id of the worker; -1: none, or it was reaped."""
    heartbeat: Heartbeat | None = None
    drained_s: float = math.inf
    """Monotonic time at which files that are still open are given up; none before a stop signal."""
    dying: set[int] = field(default_factory=set)
    """Workers that were killed and have not ended yet."""

    def run(self, on_ready: Callable[[], None], is_taken_over: bool) -> None:
        """Run the worker and restart it after crashes until it exits cleanly; then clean up.

        On any other exit the FUSE connection is aborted, so that no reader waits.
        """
        try:
            ready = self._start(resend=is_taken_over)
            if is_taken_over:
                # Do not wait for it: the mount is in use, and a worker that fails is replaced.
                os.close(ready)
            elif not self._await_ready(ready):
                # The worker has served nobody, and may be waiting for a silent storage.
                os.kill(self.worker, signal.SIGKILL)
                return
            if self.report is not None and not self.report.ready(self.answer()):
                path = self.attached.path
                raise UnavailableError(
                    f"the process that asked for the mount on {path} does not wait for it any more"
                )
            on_ready()
            while self._await_death(self.stop):
                if (code := self._reap()) == 0:
                    return
                self._replace(code)
            self._end_worker(replaces=True)
        finally:
            self._clean_up()

    def _start(self, *, resend: bool) -> int:
        """Fork a worker. Return a pipe on which it reports that it serves."""
        ready, tell = os.pipe2(os.O_CLOEXEC)
        silence_s = self.options.worker_silence_s
        if not self.attached.connection.resend:
            silence_s *= _CANNOT_REPLACE_FACTOR
        heartbeat = Heartbeat(max(_READY_DEADLINE_S, silence_s), silence_s)
        left_s = max(0.0, self.drained_s - time.monotonic())
        options = replace(self.options, shutdown_s=min(self.options.shutdown_s, left_s))
        # Until the worker has handlers of its own, a signal would run this process's in the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                _run_worker(
                    self.factory,
                    options,
                    self.attached,
                    self.report,
                    tell,
                    resend,
                    heartbeat,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self.worker = pid
        os.close(tell)
        heartbeat.start_asking()
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.heartbeat = heartbeat
        return ready

    def _await_ready(self, ready: int) -> bool:
        """Wait until the first worker serves; return early if the mount is not wanted any more.

        Return False if the worker has answered no request.
        """
        ends = [self.stop.fileno()]
        if self.report is not None:
            ends.append(self.report.fileno())
        deadline_s = time.monotonic() + _READY_DEADLINE_S
        said = b""
        try:
            while True:
                readable = wait_readable([ready, *ends], deadline_s - time.monotonic())
                if ready in readable:
                    said = os.read(ready, 1)  # b"" once the worker has ended
                if readable != [ready] or said != _BEGINS:
                    break
        finally:
            os.close(ready)
        path = self.attached.path
        if said == _SERVES or any(end in readable for end in ends):
            # A worker that has begun is ended like one that serves: a file may be open for writing.
            return bool(said)
        if not readable:
            raise UnavailableError(
                f"the file system on {path} did not start within {_READY_DEADLINE_S:.0f} s"
            )
        raise UnavailableError(f"the file system on {path} failed to start; its log says why")

    def _await_death(self, stop: StopSignal | None, limit_s: float = math.inf) -> bool:
        """Wait until the worker ends. Return False if `stop` or `limit_s` comes before."""
        worker = self.worker
        assert self.heartbeat is not None
        pidfd = os.pidfd_open(worker)
        watched = [pidfd] if stop is None else [pidfd, stop.fileno()]
        try:
            # This is the life of the mount.
            while not is_stuck(worker):
                left_s = limit_s - time.monotonic()
                readable = wait_readable(watched, min(self.heartbeat.check_s, max(0.0, left_s)))
                _reap_ended(self.dying)
                if readable or left_s <= 0:
                    return pidfd in readable
                if not self._tolerate(worker, self.heartbeat.check()):
                    break
        finally:
            os.close(pidfd)
        return True

    def _reap(self) -> int:
        """Reap the worker, which has ended or was killed, and return its exit code."""
        worker, self.worker = self.worker, -1
        code = reap(worker, _STUCK_S)
        if code is None:
            self.dying.add(worker)
            return -signal.SIGKILL
        return code

    def _tolerate(self, worker: int, silence: float) -> bool:
        """Act on a worker's silence. Return False if the worker was killed for it."""
        path = self.attached.path
        if silence >= 1:
            log.warning("process %d, which serves %s, does not answer: killing it", worker, path)
            # A frozen process dies only when thawed; the successor need not wait for that.
            os.kill(worker, signal.SIGKILL)
            return False
        if silence >= _CONTINUE_SHARE:
            log.info("process %d, which serves %s, does not answer: sending SIGCONT", worker, path)
            os.kill(worker, signal.SIGCONT)
        return True

    def _replace(self, code: int) -> None:
        """Start the successor of a worker that died. Raises: UnavailableError."""
        path = self.attached.path
        if code == HANDED_OVER and self.hand_over is not None:
            self._try_to_hand_over(self.hand_over)
            os.close(self._start(resend=True))
            return
        if not self.attached.connection.resend:
            raise UnavailableError(
                f"the process that served {path} died ({_describe_exit(code)}), and this kernel "
                "cannot hand its requests to another (Linux 6.9 can): unmounted"
            )
        pause_s = self.restart.pause_s(time.monotonic())
        if pause_s is None:
            raise UnavailableError(
                f"the processes that serve {path} keep dying ({_describe_exit(code)}): unmounted"
            )
        log.warning("the process that served %s died (%s): restarting", path, _describe_exit(code))
        if pause_s:
            # Also after a stop signal: open files work until they are closed, but not without a
            # worker.
            wait_readable([self.stop.fileno()], pause_s)
        os.close(self._start(resend=True))

    def _try_to_hand_over(self, hand_over: Callable[[Attached], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            # The newer program would not know of a stop signal that came before.
            if not wait_readable([self.stop.fileno()], 0.0):
                hand_over(self.attached)
        except Exception:
            log.exception("cannot hand %s over to newer code: serving on", self.attached.path)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _end_worker(self, *, replaces: bool) -> None:
        """Ask the worker to end, and kill it if it does not end in time.

        With `replaces`, a worker that dies while files are open has a successor, which ends like
        it. Raises: UnavailableError.
        """
        path = self.attached.path
        self.drained_s = min(self.drained_s, time.monotonic() + self.options.shutdown_s)
        while self.worker >= 0:
            os.kill(self.worker, signal.SIGTERM)
            os.kill(self.worker, signal.SIGCONT)  # a stopped process does not handle SIGTERM
            if not self._await_death(None, self.drained_s + self.stop_grace_s):
                log.warning("the process that serves %s does not end: killing it", path)
                os.kill(self.worker, signal.SIGKILL)
            # Go on even if it cannot end: readers wait for the end of the connection.
            code = self._reap()
            if code != 0 and replaces and time.monotonic() < self.drained_s:
                self._replace(code)

    def _clean_up(self) -> None:
        """End the worker and the connection, so that no reader is left waiting."""
        attached = self.attached
        self._end_worker(replaces=False)
        if attached.is_mounted():
            abort_connection(attached.device_minor, attached.path)
            detach(attached.path, lazy=True)
        elif self.connection is not None:
            self.connection.abort()


def _reap_ended(pids: set[int]) -> None:
    """Remove the processes that have ended from `pids`, and reap them. Never waits."""
    for pid in tuple(pids):
        if os.waitpid(pid, os.WNOHANG)[0]:
            pids.remove(pid)


def _describe_exit(code: int) -> str:
    """Return an exit code in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


# ---- the worker -------------------------------------------------------------------------------


def _run_worker(
    factory: Factory,
    options: MountOptions,
    attached: Attached,
    report: Report | None,
    tell: int,
    resend: bool,
    heartbeat: Heartbeat,
) -> NoReturn:
    """Serve the mount in this forked process, and exit."""
    code = _WORKER_FAILED
    try:
        with StopSignal() as stop:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            operations = _made(factory, attached, report)
            server = FuseServer(operations, attached, options, on_end=stop.wake)
            # Before the first request is answered: the threads serve while this one may wait for a
            # processor.
            _tell(tell, _BEGINS)
            server.start(resend=resend)
            heartbeat.start_answering()
            _tell(tell, _SERVES)
            os.close(tell)
            heartbeat.answer_until(stop.fileno())
            if server.failure is None:
                server.unmount()
                code = 0
    except BaseException:
        log.critical("the process that serves %s failed", attached.path, exc_info=True)
    finally:
        logging.shutdown()
        # Not sys.exit: everything above this frame belongs to the supervisor.
        os._exit(code)


def _tell(pipe: int, what: bytes) -> None:
    # After a restart nobody reads the pipe.
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, what)


def _made(factory: Factory, attached: Attached, report: Report | None) -> Operations:
    try:
        return factory(attached)
    except (BootseerError, OSError) as error:
        if report is not None:
            report.failed(error)
        raise
    finally:
        if report is not None:
            # Close this process's copy: the supervisor reports when a worker serves.
            report.close()
