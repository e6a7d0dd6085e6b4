"""Life of a node's mount servers: the process that starts them, and their removal.

`Spawner` is the parent process of the mount servers, so that a restart of the snapshotter or of the
CSI driver ends no mount. It is the only process of its container, which is replaced only when the
node is drained. It starts servers for clients (protocol: `served.spawner`) and reaps processes,
nothing else, until SIGTERM. Then it ends the servers in order: checkpoint servers first, which
write out closed files, then the trees that trainers may still read. Nothing stays mounted. It has
one thread, since a crash would end every mount of the node.

`await_removal` tells a replaced pod from a removal of Bootseer. Before a removal it waits for pods
that are still ending: without the driver and the snapshotter, a kubelet cannot unmount their
volumes nor containerd remove their containers, and the pods would never end.
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

from bootseer.errors import BootseerError, PermissionDeniedError, from_oserror
from bootseer.kubernetes.api import ACCOUNT, Api
from bootseer.linux import mount_table, namespaces
from bootseer.linux.private_files import private_directory
from bootseer.linux.processes import ProcessId, become_subreaper, child_processes, notify_systemd
from bootseer.linux.scripts import python_environment
from bootseer.served.control import listen
from bootseer.served.ending import sweep
from bootseer.served.processes import ROLES, spawn
from bootseer.served.service import CHECKPOINT, ServiceState, live_mounts
from bootseer.served.spawner import answer_ended, answer_failed, answer_started, receive_request

_log = logging.getLogger(__name__)

MOUNT_SOURCE = "bootseer-csi"
"""Source string of mounts that the CSI driver makes over served mounts."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_REQUEST_S = 5.0
_CLIENTS_MAX = 64
_TREES_END_S = 15.0
_KILLED_END_S = 5.0
_POLL_S = 0.05


class Spawner:
    """Parent process of mount servers. Main thread only."""

    def __init__(self, run_dir: Path, address: Path, grace_s: float) -> None:
        """Listen for clients on the socket `address`.

        `grace_s` is the time that checkpoint servers get at the end.

        Raises: BootseerError.
        """
        self._run_dir = run_dir
        self._address = address.absolute()
        self._grace_s = grace_s
        self._selector = selectors.DefaultSelector()
        # Clients without a request yet, each with the time of its connection.
        self._waiting: dict[socket.socket, float] = {}
        # By process id: the client that waits for the process to end.
        self._clients: dict[int, socket.socket] = {}
        private_directory(self._address.parent)
        try:
            self._listener = listen(self._address, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise from_oserror(error, f"listen on {self._address}") from error
        self._listener.setblocking(False)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve clients until SIGTERM or SIGINT, then end all servers."""
        become_subreaper()
        # A container that was killed with all of its servers left their mounts.
        sweep(self._run_dir)
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(read, selectors.EVENT_READ)
        notify_systemd("READY=1")
        on_ready()
        while True:
            for key, _ in self._selector.select(_REQUEST_S):
                if key.fd == read:
                    if not {signal.SIGTERM, signal.SIGINT}.isdisjoint(os.read(read, 4096)):
                        notify_systemd("STOPPING=1")
                        self._end_servers()
                        return
                    continue
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._receive(key.fileobj)
                except Exception:
                    # An exit would end all mounts of the node.
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

    def _receive(self, client: socket.socket) -> None:
        """Handle a client's message: its request first, and later the order to kill its process."""
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
            # The process is not reaped while it is in `_clients`, so the id cannot be reused.
            os.kill(pid, signal.SIGKILL)
        else:
            del self._clients[pid]
            self._hang_up(client)

    def _start(self, client: socket.socket) -> int:
        """Start the process that a client asks for; return its id, or 0 after an error."""
        try:
            request, fds = receive_request(client)
        except (BootseerError, OSError) as error:
            with contextlib.suppress(OSError):
                answer_failed(client, str(error))
            return 0
        try:
            # The client's code may be at another path than this process's.
            own = {"PYTHONPATH": python_environment()["PYTHONPATH"]}
            plan, sink, report = fds
            role = ROLES[request.module]
            pid = spawn(role, (plan, sink, sink, report), {**request.environment, **own})
            answer_started(client, pid)
        except (OSError, ValueError) as error:
            # ValueError: an argument has a zero byte or cannot be encoded.
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

    def _end_servers(self) -> None:
        """End all servers of this node and unmount their file systems."""
        self._address.unlink(missing_ok=True)
        self._listener.close()
        servers = [state for _, state in live_mounts(self._run_dir)]
        writers = [state for state in servers if state.purpose == CHECKPOINT]
        trees = [state for state in servers if state.purpose != CHECKPOINT]
        # Unmount the volumes first: then only running pods keep a server waiting.
        _unmount_users(writers, lambda line: False)
        self._end_all([state.processes[0] for state in writers], self._grace_s)
        # Kill the workers of servers that did not end in time.
        self._end_all([state.processes[1] for state in writers], 0)
        _unmount_users(trees, lambda line: line.source.startswith(MOUNT_SOURCE.encode()))
        children = map(ProcessId.of, child_processes())
        self._end_all([*(state.processes[0] for state in trees), *children], _TREES_END_S)

    def _end_all(self, processes: Iterable[ProcessId], timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to processes that have not ended after `timeout_s`."""
        alive = set(processes)
        for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILLED_END_S)):
            for process in alive:
                process.kill(number)
            deadline_s = time.monotonic() + wait_s
            while True:
                self._reap()
                alive = {process for process in alive if process.lives()}
                if not alive or time.monotonic() > deadline_s:
                    break
                time.sleep(_POLL_S)
            for process in alive:
                _log.warning("process %d has not ended after %g s", process.pid, wait_s)


def _unmount_users(
    servers: Iterable[ServiceState], lies_over: Callable[[mount_table.MountInfoLine], bool]
) -> None:
    """Unmount the binds of these servers' mounts, such as volumes, and mounts that `lies_over`.

    The newest is unmounted first. Open files stay usable until they are closed.
    """
    found = (mount_table.find_mount(Path(state.directory)) for state in servers)
    minors = {mount.device_minor for mount in found if mount is not None}
    text = Path("/proc/self/mountinfo").read_bytes()
    for line in reversed(list(mount_table.parse_lines(text))):
        is_served = line.kind.startswith(b"fuse.bootseer") and line.minor in minors
        if is_served or lies_over(line):
            with contextlib.suppress(OSError):
                namespaces.unmount(line.path)


PATIENCE_S = 20.0
"""Time to retry the API server, which is busy during a removal: every node asks at once."""
_RETRY_S = 0.5


def is_removed(daemonset: str) -> bool:
    """Return whether the DaemonSet NAMESPACE/NAME is gone or being deleted. Never raises.

    Errors and refusals are retried for `PATIENCE_S`. A refusal that lasts means a removal, an error
    that lasts does not.
    """
    namespace, _, name = daemonset.partition("/")
    deadlines_s: dict[bool, float] = {}
    while True:
        try:
            found = Api(ACCOUNT).get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}")
        except BootseerError as error:
            is_refusal = isinstance(error, PermissionDeniedError)
            now_s = time.monotonic()
            # Errors and refusals have separate deadlines: a refusal counts only if it lasts.
            if now_s > deadlines_s.setdefault(is_refusal, now_s + PATIENCE_S):
                if is_refusal:
                    # The role of this pod was removed too. An API server that is starting, or whose
                    # authorisation fails, refuses only for a while.
                    return True
                _log.warning("cannot tell whether %s still exists: %s", daemonset, error)
                return False
            time.sleep(_RETRY_S)
        else:
            return found is None or "deletionTimestamp" in found["metadata"]


def await_removal(
    daemonset: str | None, what: str, is_used: Callable[[], bool], patience_s: float
) -> bool:
    """Return whether Bootseer is being removed, rather than this pod replaced. Never raises.

    Before True is returned, wait until `is_used` is false, at most until `patience_s` after the
    call.

    Args:
        daemonset: The pod's DaemonSet; None: Bootseer is being removed for certain.
        what: Plural noun for the users in log messages.
        is_used: Returns whether pods still need the mounts; may raise BootseerError.
        patience_s: Longest wait.
    """
    # Time spent asking the API server counts: the kubelet kills this pod after its grace period.
    deadline_s = time.monotonic() + patience_s
    if daemonset is not None and not is_removed(daemonset):
        _log.warning("%s may still exist: nothing is removed", daemonset)
        return False
    try:
        while patience_s and is_used():
            if time.monotonic() > deadline_s:
                _log.warning(
                    "%s are still there after %g s; they end with errors", what, patience_s
                )
                break
            time.sleep(_RETRY_S)
    except BootseerError as error:
        _log.warning("cannot tell whether %s are still there: %s", what, error)
    return True
