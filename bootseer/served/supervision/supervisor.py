"""A mount that survives the death of the process that serves it.

The supervisor mounts, holds the /dev/fuse descriptor and forks a worker that serves. When the
worker dies, another takes over and makes the kernel repeat what was not answered
(FUSE_NOTIFY_RESEND, protocol 7.40): readers notice nothing but a pause. Where the kernel cannot
do that, or workers keep dying, the connection is aborted, so that readers get an error and not a
hang. If the supervisor itself is killed, the worker serves on until it is unmounted.

A worker that runs but does not answer (stopped, or frozen with its cgroup; see `heartbeat`) is told
to continue, and where that does not help it is killed and replaced as any that died. If the
supervisor is stopped or frozen as well, no process notices: readers wait until both go on, or until
the kernel gives up (`MountOptions.kernel_deadline_s`).

A worker that ends with `HANDED_OVER` wants another to take over, maybe with newer code: `hand_over`
may then replace this process by one that calls `supervise` with the same `Attached`.

What `Operations` must keep to under supervision: node ids, handles and directory cookies mean the
same in every worker, derived without state of the process (the image tree: node = inode number + 1,
handle 0) or noted before the kernel hears of them (the striped file system); a request may run
twice, so one that changes something must bear repetition; and `read` returns bytes that are
resident, not a view of a mapped file: a page that is faulted in when the worker is killed in the
middle of its reply fails that one request with EIO.

Alone forks. The supervisor stays single-threaded, and imports nothing heavy.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from bootseer.errors import InvalidInputError, UnavailableError
from bootseer.fuse.kernel import control
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Attached, attach
from bootseer.fuse.kernel.unmount import abort_connection, detach
from bootseer.linux import mount_table
from bootseer.linux.processes import is_stuck, wait_readable
from bootseer.served.processes import Ready, Report
from bootseer.served.supervision.heartbeat import Heartbeat
from bootseer.served.supervision.stop_signal import STOP_SIGNALS, StopSignal
from bootseer.served.supervision.worker import (
    Factory,
    RestartPolicy,
    code_of,
    died_of,
    ends_within,
    reap_ended,
    work,
)

log = logging.getLogger(__name__)

HANDED_OVER = 75  # EX_TEMPFAIL of sysexits.h
_READY_DEADLINE_S = 120.0
_STOP_GRACE_S = 15.0
_CONTINUE_SHARE = 0.5
"""A share of the silence after which a worker is killed: after so much it is told to continue."""
_CANNOT_REPLACE_FACTOR = 4.0
"""A worker that cannot be replaced is killed later by so much: that ends the mount."""


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
    """Mount, and serve what `factory` makes from a worker process until unmounted, SIGTERM or
    SIGINT.

    `factory` is called in each worker, after the fork. When the first worker serves `report` hears
    `answer()`, or else why there is none, and `on_ready` is called, here. Main thread of a
    single-threaded process only.

    `attached`: a mount that another process of ours has made; its requests are asked for again.
    `hand_over` is called after a worker has ended with `HANDED_OVER`, with the stop signals
    blocked; where it returns, this code goes on serving.

    `stop_grace_s`: how long a worker is given to end, after the time for open files
    (`shutdown_s`), before it is killed.

    Raises:
        InvalidInputError: this process has other threads. BootseerError: the mount failed.
        UnavailableError: the first worker did not start, workers kept dying, or no process waits
        for
            the mount any more.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise InvalidInputError(
            f"supervise() forks, but this process has {threads} threads: call it before anything "
            "starts threads, or in a process of its own"
        )
    with StopSignal() as stop:
        # Blocked by the process that handed over, until we had handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        is_taken_over = attached is not None
        attached = attached or attach(mountpoint, options)
        try:
            # From here on: once it is unmounted, its number may be another mount's.
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
    """The loop of one supervised mount."""

    factory: Factory
    options: MountOptions
    attached: Attached
    connection: control.Connection | None
    stop: StopSignal
    restart: RestartPolicy
    hand_over: Callable[[Attached], None] | None
    report: Report | None
    answer: Callable[[], Struct]
    stop_grace_s: float
    heartbeat: Heartbeat | None = None
    dying: set[int] = field(default_factory=set)
    """Workers that were killed and could not end yet."""

    def run(self, on_ready: Callable[[], None], is_taken_over: bool) -> None:
        """Until the worker ends as it should. Whatever happens, no reader waits on the mount
        then."""
        worker = -1
        try:
            worker, ready = self._start(resend=is_taken_over)
            if is_taken_over:
                # One that fails is replaced, as any that dies: the mount is in use.
                os.close(ready)
            elif not self._await_ready(ready):
                # It has served nobody, and waits for its storage, perhaps a silent one.
                os.kill(worker, signal.SIGKILL)
                return
            if self.report is not None and not self.report.ready(self.answer()):
                path = self.attached.path
                raise UnavailableError(f"nobody waits for the mount on {path} any more")
            on_ready()
            while True:
                if self._await_death(worker):
                    return
                code = code_of(worker)
                if code is None:
                    self.dying.add(worker)
                    code = -signal.SIGKILL
                worker = -1
                if code == 0:
                    return
                worker = self._replace(code)
                if worker < 0:
                    return
        finally:
            self._clean_up(worker)

    def _start(self, *, resend: bool) -> tuple[int, int]:
        """Fork a worker; its pid, and a pipe on which it says that it serves."""
        ready, tell = os.pipe2(os.O_CLOEXEC)
        silence_s = self.options.worker_silence_s
        if not self.attached.connection.resend:
            silence_s *= _CANNOT_REPLACE_FACTOR
        heartbeat = Heartbeat(max(_READY_DEADLINE_S, silence_s), silence_s)
        # A signal between the fork and the worker's own handlers would reach ours in the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                work(
                    self.factory,
                    self.options,
                    self.attached,
                    self.report,
                    tell,
                    resend,
                    heartbeat,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.close(tell)
        heartbeat.keep_asking()
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.heartbeat = heartbeat
        return pid, ready

    def _await_ready(self, ready: int) -> bool:
        """Until the first worker serves; False if told to stop before, or if nobody waits for the
        mount any more."""
        try:
            ends = [self.stop.fileno()]
            if self.report is not None:
                ends.append(self.report.fileno())
            readable = wait_readable([ready, *ends], _READY_DEADLINE_S)
            said = os.read(ready, 1) if ready in readable else b""
        finally:
            os.close(ready)
        path = self.attached.path
        if said or any(end in readable for end in ends):
            return bool(said)
        if not readable:
            raise UnavailableError(
                f"the file system on {path} did not start within {_READY_DEADLINE_S:.0f} s"
            )
        raise UnavailableError(f"the file system on {path} failed to start; its log says why")

    def _await_death(self, worker: int) -> bool:
        """Until the worker ends (False) or we are told to stop (True)."""
        assert self.heartbeat is not None
        pidfd = os.pidfd_open(worker)
        try:
            readable: list[int] = []
            # This is the life of the mount.
            while not readable and not is_stuck(worker):
                readable = wait_readable([pidfd, self.stop.fileno()], self.heartbeat.look_s)
                reap_ended(self.dying)
                if not readable and not self._sees_to(worker, self.heartbeat.look()):
                    break
        finally:
            os.close(pidfd)
        return self.stop.fileno() in readable and pidfd not in readable

    def _sees_to(self, worker: int, silence: float) -> bool:
        """Act on a worker's silence; False when it was killed."""
        path = self.attached.path
        if silence >= 1:
            log.warning("process %d, which serves %s, does not answer: killing it", worker, path)
            # Frozen with its cgroup it may die later; its successor need not wait for that.
            os.kill(worker, signal.SIGKILL)
            return False
        if silence >= _CONTINUE_SHARE:
            log.info("process %d, which serves %s, does not answer: SIGCONT", worker, path)
            os.kill(worker, signal.SIGCONT)
        return True

    def _replace(self, code: int) -> int:
        """Start the successor of a worker that died; -1 if told to stop meanwhile."""
        path = self.attached.path
        if code == HANDED_OVER and self.hand_over is not None:
            self._try_to_hand_over(self.hand_over)
            worker, ready = self._start(resend=True)
            os.close(ready)
            return worker
        if not self.attached.connection.resend:
            raise UnavailableError(
                f"the process that served {path} died ({died_of(code)}), and this kernel cannot "
                "hand its requests to another (Linux 6.9 can): unmounted"
            )
        pause_s = self.restart.pause_s(time.monotonic())
        if pause_s is None:
            raise UnavailableError(
                f"the processes that serve {path} keep dying ({died_of(code)}): unmounted"
            )
        log.warning("the process that served %s died (%s): restarting", path, died_of(code))
        if pause_s and wait_readable([self.stop.fileno()], pause_s):
            return -1
        worker, ready = self._start(resend=True)
        os.close(ready)
        return worker

    def _try_to_hand_over(self, hand_over: Callable[[Attached], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            hand_over(self.attached)
        except Exception:
            log.exception("cannot hand %s over: serving on", self.attached.path)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _clean_up(self, worker: int) -> None:
        """End the worker within its time, and see that no reader is left waiting."""
        attached = self.attached
        if worker >= 0:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGCONT)  # a stopped one would not see it
        if worker >= 0 and not ends_within(worker, self.options.shutdown_s + self.stop_grace_s):
            log.warning("the process that serves %s does not end: killing it", attached.path)
            os.kill(worker, signal.SIGKILL)
            # Whether it could end or not: its readers wait for the end of the connection.
            code_of(worker)
        mounted = mount_table.find_mount(attached.path)
        if mounted is not None and mounted.device_minor == attached.device_minor:
            abort_connection(attached.device_minor, attached.path)
            detach(attached.path, lazy=True)
        elif self.connection is not None:
            self.connection.abort()
