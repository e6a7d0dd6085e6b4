"""The parent of a forked worker, which ends with whoever stands for it.

A fork of the preloader, like the worker: an interpreter of its own would take a worker's start as
much time as all else. It looks at nothing but two processes. Standard library alone; one thread.
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

_LOOK_MS = 200


def guard(connection: Any, worker: int, stand_in: int) -> NoReturn:
    """The worker's parent: tells its end, passes signals on, and ends it with its stand-in."""
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
    # We have stopped the worker, others have; our stand-in was asked to stop, and has heard of it.
    is_stopped = is_stopped_by_others = is_asked = has_heard = False
    # So many SIGCONT that the stand-in passes on are our own.
    own_count = 0
    while True:
        # Before it waits: the worker may have ended before there was a handler.
        pid, status = posix.waitpid(worker, posix.WNOHANG | posix.WUNTRACED | posix.WCONTINUED)
        if pid and posix.WIFSTOPPED(status):
            if not is_stopped:
                is_stopped_by_others, is_asked, has_heard = True, True, False
                send(connection, b"S\0\0\0\0")
        elif pid and posix.WIFCONTINUED(status):
            is_asked |= is_stopped
            is_stopped = is_stopped_by_others = False
        elif pid:
            send(connection, b"E" + status.to_bytes(4, "big"))
            posix._exit(0)
        # Nothing tells that another process was stopped.
        state = read(f"/proc/{stand_in}/stat").rpartition(b")")[2].split()[:1]
        if state == [b"T"] and not is_stopped_by_others:
            if is_asked:
                is_asked = False
                own_count += 1
                _kill(stand_in, SIGCONT, of_group=False)
            elif not is_stopped:
                is_stopped = True
                _kill(worker, SIGSTOP, of_group=True)
        for ready, _ in poll.poll(_LOOK_MS):
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
                # Where it is a launcher, its workers are groups of their own.
                for one in _below(worker):
                    _kill(one, SIGKILL, of_group=False)
                _kill(worker, SIGKILL, of_group=True)
                posix.waitpid(worker, 0)
                posix._exit(0)
            for place in range(0, len(data) - 1, 2):
                number = data[place]
                if number == 0:
                    has_heard = True
                elif number == SIGCONT and own_count:
                    own_count -= 1
                elif number == SIGCONT and is_stopped_by_others and not has_heard:
                    pass  # from before the worker was stopped
                else:
                    if number == SIGCONT:
                        is_stopped, is_asked = False, is_asked and not has_heard
                    _kill(worker, number, of_group=bool(data[place + 1]))


def _kill(worker: int, number: int, *, of_group: bool) -> None:
    try:
        if of_group and posix.getpgid(worker) == worker:
            posix.killpg(worker, number)
        else:
            posix.kill(worker, number)
    except OSError:
        return


def _below(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have: stopped, all of them."""
    _kill(pid, SIGSTOP, of_group=False)
    found: list[int] = []
    try:
        tasks = posix.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        for child in map(int, read(f"/proc/{pid}/task/{task}/children").split()):
            found += [*_below(child), child]
    return found
