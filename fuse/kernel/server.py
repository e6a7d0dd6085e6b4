"""A mounted file system: its life from mount to unmount.

`Server` serves from background threads of this process; `serve` and `supervise` build on it.
Alone ties mount, negotiation, session and shutdown together. `Server` is thread-safe.
"""

import logging
import os
import threading
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BusyError, InvalidInputError, UnavailableError, from_oserror
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.backing import BackingFiles, new_table
from bootseer.fuse.kernel.connection import Connection, decode_init, negotiate
from bootseer.fuse.kernel.dispatch import Dispatcher
from bootseer.fuse.kernel.mount import mount, set_readahead
from bootseer.fuse.kernel.operations import Buffer, Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.session import Session
from bootseer.fuse.kernel.unmount import abort_connection, detach
from bootseer.linux import mount_table
from bootseer.linux.processes import wait_readable

log = logging.getLogger(__name__)

_HANDSHAKE_DEADLINE_S = 10.0
_KERNEL_READAHEAD_BYTES = 128 * 1024
_THREADS_END_S = 5.0


class Attached(Struct, frozen=True):
    """A live mount whose INIT is answered: what a server, or its successor, serves."""

    device: int
    """The /dev/fuse descriptor."""
    device_minor: int
    path: Path
    connection: Connection
    backing_table: mmap | None


def attach(mountpoint: Path, options: MountOptions) -> Attached:
    """Mount and answer INIT. Imports nothing heavy and starts no thread, so a fork may follow.

    Raises:
        BootseerError: see `mount`; UnavailableError if the kernel says nothing.
    """
    path = mount_table.absolute(mountpoint)
    device = mount(mountpoint, options)
    try:
        # The kernel sends INIT by itself, right after the mount.
        if not wait_readable([device], _HANDSHAKE_DEADLINE_S):
            raise UnavailableError(f"the kernel does not open the connection for {path}")
        request = decode_init(os.read(device, wire.REQUEST_OVERHEAD_BYTES))
        connection, body = negotiate(request, options)
        size = wire.OUT_HEADER_BYTES + len(body)
        os.write(device, wire.OUT_HEADER.pack(size, 0, request.unique) + body)
        mounted = mount_table.find_mount(path) or mount_table.find_mount(path.resolve())
        if mounted is None:
            raise UnavailableError(f"the mount on {path} is gone again: somebody unmounted it")
        path = mounted.path
        if options.max_readahead_bytes != _KERNEL_READAHEAD_BYTES:
            set_readahead(mounted.device_minor, options.max_readahead_bytes)
        table = new_table() if connection.passthrough else None
        return Attached(device, mounted.device_minor, path, connection, table)
    except BaseException as error:
        try:
            detach(path, lazy=True)
        except Exception:
            log.debug("cannot unmount %s after a failed start", path, exc_info=True)
        os.close(device)
        if isinstance(error, OSError) and type(error) is OSError:
            raise from_oserror(error, f"open the FUSE connection of {path}") from error
        raise


class Server:
    """Serves `operations` on `mountpoint` from background threads.

        with Server(operations, Path("/mnt/x"), MountOptions()) as server:
            ...

    `on_end` is called once from a server thread when serving ends for whatever reason.
    """

    def __init__(
        self,
        operations: Operations,
        mountpoint: Path,
        options: MountOptions,
        *,
        on_end: Callable[[], None] | None = None,
        abort_on_failure: bool = True,
    ) -> None:
        """`abort_on_failure=False` is for a process whose supervisor replaces it when it fails."""
        self.operations = operations
        self.mountpoint = mountpoint
        self.options = options
        self.failure: BaseException | None = None
        """Why serving ended, if a server thread failed."""
        self._on_end = on_end
        self._abort_on_failure = abort_on_failure
        self._attached: Attached | None = None
        self._session: Session | None = None
        self._dispatcher: Dispatcher | None = None
        self._ended = threading.Event()
        self._close_lock = threading.Lock()
        # Held while notifying, so that the descriptor is not closed, and reused, under a write.
        self._notify_lock = threading.Lock()
        self._closed = False

    # ---- start ------------------------------------------------------------------------------

    def mount(self) -> None:
        """Mount and start serving. The mount works when this returns.

        Raises:
            BootseerError: the mount failed; nothing is left of it.
        """
        if self._attached is not None:
            raise BusyError(f"this server has been started already, on {self._attached.path}")
        self.adopt(attach(self.mountpoint, self.options), resend=False)

    def adopt(self, attached: Attached, *, resend: bool) -> None:
        """Start serving a mount that is there already; with `resend`, take over from a server
        that died: the kernel repeats to us what that one did not answer."""
        backing = None
        if attached.backing_table is not None:
            backing = BackingFiles(attached.device, attached.backing_table)
        self._attached = attached
        self._dispatcher = Dispatcher(self.operations, backing)
        if attached.connection.times_out:
            self.operations.store_pages = self.notify_store
        self.operations.forget_pages = self.notify_inval_inode
        try:
            self.operations.mounted()
        except BaseException:
            self._closed = True
            if self._abort_on_failure:
                self.detach()
                self.abort()
                os.close(attached.device)
            self._end(None)
            raise
        self._session = Session(
            attached.device,
            self._dispatcher,
            attached.connection,
            threads=self.options.threads,
            request_deadline_s=self.options.request_deadline_s,
            on_end=self._end,
        )
        if resend:
            # Before the threads start: it repeats all that was taken, also what they would take.
            self.notify_resend()
        self._session.start()

    def __enter__(self) -> "Server":
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    # ---- facts ------------------------------------------------------------------------------

    @property
    def attached(self) -> Attached:
        """The live mount. Raises InvalidInputError before `mount`."""
        if self._attached is None:
            raise InvalidInputError("this server is not mounted yet: call mount() first")
        return self._attached

    @property
    def connection(self) -> Connection:
        """What the kernel agreed to."""
        return self.attached.connection

    def lookup_counts(self) -> dict[int, int]:
        """node -> how many lookups the kernel has not forgotten yet."""
        return {} if self._dispatcher is None else self._dispatcher.lookups.snapshot()

    def backing_counts(self) -> dict[int, tuple[int, int]]:
        """node -> (backing id, or 0; opens) where passthrough was agreed on."""
        dispatcher = self._dispatcher
        if dispatcher is None or dispatcher.backing is None:
            return {}
        return dispatcher.backing.open_counts()

    # ---- notifications ----------------------------------------------------------------------
    # Never from inside an operation, for which the kernel may hold a lock; but for attributes alone
    # (a negative offset), which need none.

    def notify_inval_inode(self, node: int, offset: int = 0, length: int = 0) -> bool:
        """Drop cached attributes, and the pages of a range (length 0: to the end; a negative
        offset: attributes only). False: the kernel does not have the node."""
        body = wire.INVAL_INODE_OUT.pack(node, offset, length)
        return self._notify(wire.encode_notify(wire.NOTIFY_INVAL_INODE, body))

    def notify_inval_entry(self, parent: int, name: bytes, *, expire_only: bool = False) -> bool:
        """Drop a cached name, also a negative one. `expire_only`: ask about it again at its next
        use, where the kernel can do that (else drop). False: the kernel does not have it."""
        flags = wire.EXPIRE_ONLY if expire_only and self.connection.expire_only else 0
        body = wire.INVAL_ENTRY_OUT.pack(parent, len(name), flags)
        return self._notify(wire.encode_notify(wire.NOTIFY_INVAL_ENTRY, body, name, b"\0"))

    def notify_store(self, node: int, offset: int, data: Buffer) -> bool:
        """Put bytes into the page cache of a file. False: the kernel does not have the node.

        Waits for reads under way of the same pages, so it is not for a thread that one of them
        waits for. Killed in here, this process does not end before a successor brings the pages, or
        the kernel gives the reads up."""
        body = wire.STORE_OUT.pack(node, offset, len(data), 0)
        return self._notify(wire.encode_notify(wire.NOTIFY_STORE, body, data))

    def notify_resend(self) -> bool:
        """Make the kernel repeat every request that was taken and not answered. Only for a
        server that takes over; False where the kernel cannot (before 7.40)."""
        if not self.connection.resend:
            return False
        return self._notify(wire.encode_notify(wire.NOTIFY_RESEND))

    def _notify(self, message: bytes) -> bool:
        try:
            with self._notify_lock:
                if self._closed:
                    return False
                os.write(self.attached.device, message)
        except (FileNotFoundError, ConnectionError):
            return False
        except OSError as error:
            if self._ended.is_set():
                return False
            raise from_oserror(error, f"notify the kernel about {self.attached.path}") from error
        return True

    # ---- end --------------------------------------------------------------------------------

    def _end(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.failure = failure
            if self._abort_on_failure and not self.abort():
                log.critical("%s cannot be aborted: end this process", self.attached.path)
        self._ended.set()
        if self._on_end is not None:
            self._on_end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until serving ends: unmounted, aborted or failed."""
        return self._ended.wait(timeout_s)

    def abort(self) -> bool:
        """Fail every request now and for ever. False where it is not possible."""
        attached = self.attached
        return abort_connection(attached.device_minor, attached.path)

    def detach(self) -> None:
        """Take the mount off its path, if it is still ours; open files live on."""
        attached = self.attached
        mounted = mount_table.find_mount(attached.path)
        if mounted is not None and mounted.device_minor == attached.device_minor:
            detach(attached.path, lazy=True)

    def unmount(self, *, timeout_s: float | None = None) -> None:
        """End serving: detach, give open files `timeout_s` (default: `shutdown_s`), abort what
        is left, release everything. Idempotent.

        Raises:
            UnavailableError: a server thread had failed.
            BootseerError: the mount cannot be taken off.
        """
        if self._attached is None:
            return
        if not self._ended.is_set():
            self.detach()
            wait_s = self.options.shutdown_s if timeout_s is None else timeout_s
            if not self._ended.wait(wait_s):
                log.warning(
                    "%s still has open files, or reads under way: aborting them",
                    self._attached.path,
                )
                self.abort()
                self._ended.wait(_THREADS_END_S)
        self.close()

    def close(self) -> None:
        """Release everything after serving ended. Idempotent.

        Raises:
            UnavailableError: a server thread had failed.
        """
        with self._close_lock:
            if not self._closed and self._attached is not None:
                self._closed = True
                self._release(self._attached)
        if self.failure is not None:
            raise UnavailableError(
                f"serving {self.attached.path} failed: {self.failure!r}; its readers got an error"
            ) from self.failure

    def _release(self, attached: Attached) -> None:
        # An aborted mount, whichever process aborted it, stays in its place and answers ENOTCONN.
        try:
            self.detach()
        except Exception:
            log.warning("cannot unmount %s", attached.path, exc_info=True)
        done = self._session is None or self._session.join(_THREADS_END_S)
        if not done:
            log.warning("some operations on %s do not end", attached.path)
        try:
            if done and self._session is not None and self._session.was_unmounted:
                self.operations.all_closed()
            self.operations.destroyed()
        except BaseException:
            log.exception("the file system on %s failed while it was released", attached.path)
        if done:
            # A thread that is still in an operation would reply on a reused descriptor.
            with self._notify_lock:
                os.close(attached.device)
