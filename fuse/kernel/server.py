"""A mounted file system, from the mount to the end of serving.

`attach` mounts and negotiates the protocol; `FuseServer` answers requests from threads of this
process. `served.supervision` calls `attach` in a supervisor and `FuseServer` in a worker, which it
replaces when the worker dies.
"""

import errno
import logging
import os
import select
import threading
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from msgspec import Struct

from bootseer.errors import UnavailableError, from_oserror
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.backing import BackingFiles, new_table
from bootseer.fuse.kernel.connection import ConnectionFeatures, decode_init, negotiate
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
    """Mount whose INIT is answered, to be served by a server and its successors."""

    device: int
    """The /dev/fuse descriptor."""
    device_minor: int
    path: Path
    connection: ConnectionFeatures
    backing_table: mmap | None

    def is_mounted(self) -> bool:
        """Return whether this mount, and no later one, is on `path`. Needs the open descriptor."""
        mounted = mount_table.find_mount(self.path)
        if mounted is None or mounted.device_minor != self.device_minor:
            return False
        # The kernel reuses the number of a dropped connection for the next mount, perhaps on this
        # path. A connection that exists now also existed when the table was read.
        return not self._is_gone()

    def _is_gone(self) -> bool:
        """Return whether the kernel has dropped the connection; an aborted one stays mounted."""
        poll = select.poll()
        poll.register(self.device, select.POLLERR)
        if not poll.poll(0):
            return False
        try:
            # This takes no request, since the connection has ended.
            os.read(self.device, self.connection.max_write_bytes + wire.REQUEST_OVERHEAD_BYTES)
        except OSError as error:
            return error.errno == errno.ENODEV
        return False


def attach(mountpoint: Path, options: MountOptions) -> Attached:
    """Mount and answer INIT. Imports nothing heavy and starts no thread, so a fork may follow.

    Raises:
        BootseerError: see `mount`; UnavailableError if the kernel does not send INIT.
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


class FuseServer:
    """Threads that answer the requests for one mount with an `Operations`. Thread-safe.

    `on_end` is called once from a server thread when serving ends. If a server thread failed,
    `failure` is set, and requests wait for a successor or for the abort of the connection.
    """

    def __init__(
        self,
        operations: Operations,
        attached: Attached,
        options: MountOptions,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self.operations = operations
        self.attached = attached
        self.options = options
        self.failure: BaseException | None = None
        """The exception that ended a server thread, if one did."""
        self._on_end = on_end
        self._session: Session | None = None
        self._ended = threading.Event()
        self._close_lock = threading.Lock()
        # Held while notifying, so that the descriptor is not closed, and reused, under a write.
        self._notify_lock = threading.Lock()
        self._closed = False

    def start(self, *, resend: bool) -> None:
        """Start the threads. The mount works when this returns.

        With `resend`, take over from a server that died: the kernel repeats the requests that the
        server took and did not answer.

        Raises: any error of `Operations.mounted`; then no thread was started.
        """
        attached = self.attached
        table = attached.backing_table
        backing = None if table is None else BackingFiles(attached.device, table)
        if attached.connection.times_out:
            self.operations.store_pages = self.notify_store
        self.operations.forget_pages = self.notify_inval_inode
        self.operations.mounted()
        self._session = Session(
            attached.device,
            Dispatcher(self.operations, backing),
            attached.connection,
            threads=self.options.threads,
            request_deadline_s=self.options.request_deadline_s,
            on_end=self._end,
        )
        if resend and attached.connection.resend:
            # Before the threads start, because the kernel would repeat requests that they took.
            self._notify(wire.encode_notify(wire.NOTIFY_RESEND))
        self._session.start()

    # ---- notifications ----------------------------------------------------------------------
    # Not to be called inside an operation, for which the kernel may hold a lock, except to drop
    # attributes only (a negative offset), which needs no lock.

    def notify_inval_inode(self, node: int, offset: int = 0, length: int = 0) -> bool:
        """Drop a node's cached attributes, and cached pages of a range.

        Length 0 means to the end of the file; a negative offset means attributes only. Return False
        if the kernel does not have the node.
        """
        body = wire.INVAL_INODE_OUT.pack(node, offset, length)
        return self._notify(wire.encode_notify(wire.NOTIFY_INVAL_INODE, body))

    def notify_store(self, node: int, offset: int, data: Buffer) -> bool:
        """Put bytes into the page cache of a file. Return False if the kernel lacks the node.

        Waits for reads of the same pages that are under way, so it must not be called by a thread
        that such a read waits for. If this process is killed during the call, it ends only when a
        successor brings the pages or the kernel gives up the reads.
        """
        body = wire.STORE_OUT.pack(node, offset, len(data), 0)
        return self._notify(wire.encode_notify(wire.NOTIFY_STORE, body, data))

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
        self.failure = failure
        self._ended.set()
        self._on_end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until serving ends: unmounted, aborted or failed."""
        return self._ended.wait(timeout_s)

    def abort(self) -> bool:
        """Fail all requests, now and later. Return False if that is not possible."""
        return abort_connection(self.attached.device_minor, self.attached.path)

    def detach(self) -> None:
        """Unmount the path if this mount is still there. Open files still work."""
        if self.attached.is_mounted():
            detach(self.attached.path, lazy=True)

    def unmount(self) -> None:
        """End serving and release everything. Idempotent.

        Detach the mount, wait `MountOptions.shutdown_s` until open files are closed, then abort the
        connection.

        Raises:
            BootseerError: the mount cannot be detached.
        """
        if not self._ended.is_set():
            self.detach()
            if not self._ended.wait(self.options.shutdown_s):
                log.warning(
                    "%s still has open files, or reads under way: aborting them",
                    self.attached.path,
                )
                self.abort()
                self._ended.wait(_THREADS_END_S)
        with self._close_lock:
            if not self._closed:
                self._closed = True
                self._release()

    def _release(self) -> None:
        attached = self.attached
        # An aborted mount stays on its path, and answers ENOTCONN, until it is detached.
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
            # Not while a thread is in an operation, which would reply on a reused descriptor.
            with self._notify_lock:
                os.close(attached.device)
