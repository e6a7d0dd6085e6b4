"""Parent of a forked worker, which passes signals and ends the worker together with its stand-in.

A fork of the preloader, like the worker, since an interpreter of its own would double a worker's
start. It observes two processes and nothing else. Standard library alone; one thread.
"""

import _signal  # type: ignore[import-not-found]
import posix
import select
from typing import Any, NoReturn

from bootseer.served.preload.shim import (
    SIGCHLD,
    SIGCONT,
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    read,
    send,
)

_CHECK_MS = 200


def guard(connection: Any, worker: int, stand_in: int) -> NoReturn:
    """Report the worker's end, pass signals on to it, and kill it if its stand-in ends."""
    descriptor = connection.fileno()
    connection.setblocking(False)
    reader, writer = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
    _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _signal.signal(SIGCHLD, lambda *_: None)
    for number in (1, 2, 3, SIGTERM):
        _signal.signal(number, _signal.SIG_IGN)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(reader, select.POLLIN)
    # The guard has stopped the worker; somebody else has; the stand-in was asked to stop; the
    # stand-in has confirmed that.
    is_stopped = is_stopped_by_others = is_asked = has_confirmed = False
    # Number of SIGCONT sent to the stand-in by the guard, which the stand-in will pass on.
    own_count = 0
    while True:
        # Before the first wait, since the worker may have ended before there was a handler.
        pid, status = posix.waitpid(worker, posix.WNOHANG | posix.WUNTRACED | posix.WCONTINUED)
        if pid and posix.WIFSTOPPED(status):
            if not is_stopped:
                is_stopped_by_others, is_asked, has_confirmed = True, True, False
                send(connection, b"S\0\0\0\0")
        elif pid and posix.WIFCONTINUED(status):
            is_asked |= is_stopped
            is_stopped = is_stopped_by_others = False
        elif pid:
            send(connection, b"E" + status.to_bytes(4, "big"))
            posix._exit(0)
        # No event reports that a process other than a child was stopped, so its state is polled.
        state = read(f"/proc/{stand_in}/stat").rpartition(b")")[2].split()[:1]
        if state == [b"T"] and not is_stopped_by_others:
            if is_asked:
                is_asked = False
                own_count += 1
                _kill(stand_in, SIGCONT, of_group=False)
            elif not is_stopped:
                is_stopped = True
                _kill(worker, SIGSTOP, of_group=True)
        for ready, _ in poll.poll(_CHECK_MS):
            if ready == reader:
                posix.read(reader, 512)
                continue
            try:
                data = connection.recv(512)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                # If the worker is a launcher, its workers have process groups of their own.
                for one in _stopped_descendants(worker):
                    _kill(one, SIGKILL, of_group=False)
                _kill(worker, SIGKILL, of_group=True)
                posix.waitpid(worker, 0)
                posix._exit(0)
            for place in range(0, len(data) - 1, 2):
                number = data[place]
                if number == 0:
                    has_confirmed = True
                elif number == SIGCONT and own_count:
                    own_count -= 1
                elif number == SIGCONT and is_stopped_by_others and not has_confirmed:
                    pass  # sent before the worker was stopped
                else:
                    if number == SIGCONT:
                        is_stopped, is_asked = False, is_asked and not has_confirmed
                    _kill(worker, number, of_group=bool(data[place + 1]))


def _kill(worker: int, number: int, *, of_group: bool) -> None:
    try:
        if of_group and posix.getpgid(worker) == worker:
            posix.killpg(worker, number)
        else:
            posix.kill(worker, number)
    except OSError:
        return


def _stopped_descendants(pid: int) -> list[int]:
    """Stop the process and all its descendants, and return the descendants."""
    _kill(pid, SIGSTOP, of_group=False)
    found: list[int] = []
    try:
        tasks = posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        for child in map(int, read(f"/proc/{pid}/task/{task}/children").split()):
            found += [*_stopped_descendants(child), child]
    return found
