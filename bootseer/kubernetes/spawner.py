"""The process that mount servers live under, so that neither a snapshotter's nor a CSI driver's end
ends a mount: the only process of a container that is replaced when its node is drained.

It starts what clients ask for (`served.spawner` has the exchange), reaps all that ends, and does
nothing else until SIGTERM. Then it ends the servers in order: those of checkpoints first, which
write out what was closed, then the trees that trainers may still read. Nothing stays mounted. One
thread: a crash here would end every mount of the node.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bootseer.errors import BootseerError, from_oserror
from bootseer.linux import mount_table, namespaces
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import ProcessId, be_subreaper, child_processes
from bootseer.linux.scripts import python_environment
from bootseer.linux.systemd import notify
from bootseer.served.control import listen
from bootseer.served.ending import sweep
from bootseer.served.folders import CHECKPOINT, MountState, live_mounts
from bootseer.served.processes import ROLES, spawn
from bootseer.served.spawner import (
    answer_ended,
    answer_failed,
    answer_started,
    receive_request,
)

_log = logging.getLogger(__name__)

MOUNT_SOURCE = "bootseer-csi"
"""The source of mounts that the CSI driver makes itself, over what servers serve."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_REQUEST_S = 5.0
_CLIENTS_MAX = 64
_TREES_END_S = 15.0
_KILLED_END_S = 5.0
_LOOK_S = 0.05

"""A process's id, and when it started."""


class Spawner:
    """Starts and reaps servers. Main thread only."""

    def __init__(self, run_dir: Path, address: Path, grace_s: float) -> None:
        """`grace_s`: what the writers of checkpoints have at the end. Raises: BootseerError."""
        self._run_dir = run_dir
        self._address = address.absolute()
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        # Who has been let in and has asked for nothing yet, and since when.
        self._waiting: dict[socket.socket, float] = {}
        # Who waits for the end of a process.
        self._clients: dict[int, socket.socket] = {}
        private_directory(self._address.parent)
        try:
            self._listener = listen(self._address, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise from_oserror(error, f"listen on {self._address}") from error
        self._listener.setblocking(False)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Until SIGTERM or SIGINT, and until what was started has ended then."""
        be_subreaper()
        # Of a container that was killed with all of its servers.
        sweep(self._run_dir)
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(read, selectors.EVENT_READ)
        notify("READY=1")
        on_ready()
        while True:
            for key, _ in self._selector.select(_REQUEST_S):
                if key.fd == read:
                    if not {signal.SIGTERM, signal.SIGINT}.isdisjoint(os.read(read, 4096)):
                        notify("STOPPING=1")
                        self._end()
                        return
                    continue
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._hear(key.fileobj)
                except Exception:
                    # With this process all mounts of the node would go.
                    _log.exception("unexpected error with a client")
            self._reap()
            self._hang_up_on_silent()

    # ---- clients --------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            _log.debug("a client hung up: %s", error)
            return
        if len(self._waiting) >= _CLIENTS_MAX:
            client.close()
            return
        client.setblocking(False)
        self._waiting[client] = time.monotonic()
        self._selector.register(client, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        """The request of a client, or its wish that what it asked for should end."""
        if client in self._waiting:
            del self._waiting[client]
            pid = self._start(client)
            if pid:
                self._clients[pid] = client
            else:
                self._hang_up(client)
            return
        pid = next(pid for pid, one in self._clients.items() if one is client)
        try:
            wants_end = bool(client.recv(1))
        except OSError:
            wants_end = False
        if wants_end:
            # Not reaped before it is taken from the clients: the id is still its own.
            os.kill(pid, signal.SIGKILL)
        else:
            del self._clients[pid]
            self._hang_up(client)

    def _start(self, client: socket.socket) -> int:
        """The process that `client` asks for; 0 where it gets none."""
        try:
            request, fds = receive_request(client)
        except (BootseerError, OSError) as error:
            with contextlib.suppress(OSError):
                answer_failed(client, str(error))
            return 0
        try:
            # The client's own code may lie elsewhere.
            own = {"PYTHONPATH": python_environment()["PYTHONPATH"]}
            plan, sink, report = fds
            role = ROLES[request.module]
            pid = spawn(role, (plan, sink, sink, report), {**request.environment, **own})
            answer_started(client, pid)
        except (OSError, ValueError) as error:
            # ValueError: of a word with a zero byte, or what cannot be encoded.
            with contextlib.suppress(OSError):
                answer_failed(client, str(error))
            return 0
        finally:
            for fd in fds:
                os.close(fd)
        _log.info("started %s as process %d", request.module, pid)
        return pid

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self._clients.pop(ended[0], None)
                if client is not None:
                    with contextlib.suppress(OSError):
                        answer_ended(client)
                    self._hang_up(client)

    def _hang_up_on_silent(self) -> None:
        for client, since_s in list(self._waiting.items()):
            if time.monotonic() - since_s > _REQUEST_S:
                del self._waiting[client]
                self._hang_up(client)

    def _hang_up(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()

    # ---- the end --------------------------------------------------------------------------------

    def _end(self) -> None:
        """End all servers of this node, and take off what they have mounted."""
        self._address.unlink(missing_ok=True)
        self._listener.close()
        servers = [state for _, state in live_mounts(self._run_dir)]
        writers = [state for state in servers if state.purpose == CHECKPOINT]
        trees = [state for state in servers if state.purpose != CHECKPOINT]
        # First what shows them: then only pods that live keep a server waiting.
        _take_off(writers, lambda line: False)
        self._end_all([state.processes[0] for state in writers], self._grace_s)
        # Of those that did not end in time.
        self._end_all([state.processes[1] for state in writers], 0)
        _take_off(trees, lambda line: line.source.startswith(MOUNT_SOURCE.encode()))
        children = map(ProcessId.of, child_processes())
        self._end_all([*(state.processes[0] for state in trees), *children], _TREES_END_S)

    def _end_all(self, processes: Iterable[ProcessId], timeout_s: float) -> None:
        """SIGTERM, and SIGKILL where that does not help in time."""
        left = set(processes)
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILLED_END_S)):
            for process in left:
                process.kill(number)
            deadline_s = time.monotonic() + wait_s
            while True:
                self._reap()
                left = {process for process in left if process.lives()}
                if not left or time.monotonic() > deadline_s:
                    break
                time.sleep(_LOOK_S)
            for process in left:
                _log.warning("process %d has not ended after %g s", process.pid, wait_s)


def _take_off(servers: Iterable[MountState], lies_over: Callable[[mount_table.Line], bool]) -> None:
    """Take off what shows the mounts of these servers, such as pods' volumes, and what lies over
    them, the newest first. Files that are open there live on until they are closed."""
    found = (mount_table.find_mount(Path(state.directory)) for state in servers)
    minors = {mount.device_minor for mount in found if mount is not None}
    text = Path("/proc/self/mountinfo").read_bytes()
    for line in reversed(list(mount_table.parse_lines(text))):
        is_served = line.kind.startswith(b"fuse.bootseer") and line.minor in minors
        if is_served or lies_over(line):
            with contextlib.suppress(OSError):
                namespaces.unmount(line.path)
