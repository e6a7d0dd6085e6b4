"""The connection to one folder of an HDFS: its URL and options, and calls within the deadline.

Alone owns the client of hdfs-native and how its failures become ours. Any thread; survives a fork.
"""

import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    UnavailableError,
)
from bootseer.store.deadline import Call, DeadlineCaller
from bootseer.store.hdfs.direct.checksums import ChecksumKind
from bootseer.store.hdfs.direct.datanode import DataNodes
from bootseer.store.hdfs.direct.direct_writer import DirectFile
from bootseer.store.hdfs.direct.placing import HdfsPlacer
from bootseer.store.hdfs.errors import (
    is_not_serving,
    is_unanswered,
    refused_datanode_count,
    translate,
)
from bootseer.store.hdfs.folder import HdfsFolder, HdfsOptions
from bootseer.store.hdfs.rpc.calls import UNANSWERED
from bootseer.store.hdfs.rpc.name_node import FoundNameNode
from bootseer.store.hdfs.space import HdfsSpace
from bootseer.transfer.policy import SOON, UNTIL_DEADLINE, Attempts

if TYPE_CHECKING:
    from hdfs_native import Client

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_DEADLINE_S = 60.0
# A DataNode that hangs is left in time for hdfs-native to try, and then for another replica.
_SILENCES_PER_DEADLINE = 4
# A DataNode that hangs is left in time for the caller to try another one.
_SILENCE_SHARE = 0.5
# More parallel calls than any plan of ours makes; a call that is stuck keeps one.
_THREADS_MAX = 128
# hdfs-native keeps DataNodes' connections for 3 s, for the whole process.
_CONNECTION_KEPT_S = 3.1
_REPLACE_DATANODE = "dfs.client.block.write.replace-datanode-on-failure"


class HdfsConnection(HdfsFolder):
    """What files, directories and writers of one folder are reached through."""

    def __init__(self, url: str, *, deadline_s: float | None = None) -> None:
        options = HdfsOptions(url, deadline_s or _DEADLINE_S)
        super().__init__(url)
        parts = urlsplit(url, allow_fragments=False)
        self._cluster = f"{parts.scheme}://{parts.netloc}"
        self.deadline_s = options.deadline_s
        self._options = options
        self._found = FoundNameNode(self._cluster, self.deadline_s)
        self._placer = HdfsPlacer(self._found)
        self._space = HdfsSpace(self._found)
        self._connect()
        self._mode_or_none: int | None = None
        self._patience_s = 0.0

    def wait_for_servers(self, patience_s: float) -> None:
        """As `Backend.wait_for_servers`."""
        self._patience_s = patience_s

    def _connect(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._caller = DeadlineCaller(_THREADS_MAX, "bootseer-hdfs")
        self._client_or_none: Client | None = None
        self._order: dict[str, str] = {}
        self._data_nodes = DataNodes(self.deadline_s / _SILENCES_PER_DEADLINE)

    @property
    def data_nodes(self) -> DataNodes:
        """The DataNodes, to read from without hdfs-native."""
        self._notice_fork()
        return self._data_nodes

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._connect()  # the parent's threads and connections stayed there

    def create_raw(self, path: str, *, overwrite: bool, replication: int | None = None) -> Any:
        """A new file as hdfs-native's own writer, for `HdfsWriter`."""
        full = self.full(path)
        return self.call(
            # `inner`: the Python wrapper is an io.RawIOBase, whose finalizer closes, which would
            # make a half-written file look complete.
            lambda client: client.inner.create(full, self._write_options(overwrite, replication)),
            "create",
            path,
        )

    @property
    def placer(self) -> HdfsPlacer:
        """Chooses DataNodes."""
        return self._placer

    def call(
        self,
        function: "Callable[[Client], Result]",
        verb: str,
        path: str,
        *,
        is_question: bool = False,
    ) -> Result:
        """What `function` returns, within the deadline; errors say `verb` and `path`."""
        return self.run(lambda _: function(self.client()), verb, path, is_question=is_question)

    def run(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        path: str,
        *,
        deadline_s: float | None = None,
        is_question: bool = False,
    ) -> Result:
        """As `call`, for work that reports its progress. `is_question`: doing it twice changes no
        more than doing it once, here either, and it is done again where a NameNode was left
        meanwhile, or had no time to answer.

        A NameNode that is not ready yet is waited for, until the deadline or as long as
        `wait_for_servers` says.
        """
        deadline_s = deadline_s or self.deadline_s
        attempts = Attempts(UNTIL_DEADLINE, self._patience_s or deadline_s)
        while True:
            try:
                return self._run_once(work, verb, path, deadline_s, is_question=is_question)
            except UnavailableError as error:
                cause = error.__cause__
                is_gone = isinstance(cause, OSError) and not isinstance(cause, BootseerError)
                was_lost = is_gone or is_unanswered(cause)
                may_repeat = is_not_serving(cause) or (is_question and was_lost)
                pause_s = attempts.pause_s(error) if may_repeat else None
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def _run_once(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        path: str,
        deadline_s: float,
        *,
        is_question: bool,
    ) -> Result:
        self._notice_fork()
        refusal: OSError | None = None

        def look() -> None:
            nonlocal refusal
            refusal = self._found.refusal() or refusal

        what = f"{verb} {self.name(path)}"
        order = self._order

        def translated(call: Call[Result]) -> Result:
            try:
                return work(call)
            except BaseException as error:  # PanicException is no Exception
                raise self._told_apart(translate(error, what)) from error

        # Only what the work raised is its failure: a signal that ends the waiting passes.
        try:
            return self._caller.run(translated, deadline_s, look)
        except DeadlineError as error:
            look()
            if refusal is not None:
                # Also where it is back by now: hdfs-native may be long in noticing.
                raise UnavailableError(
                    f"cannot {what}: within {deadline_s:g} s no NameNode took a connection "
                    f"({refusal})"
                ) from refusal
            if self._found.has_left(order):
                self._leave(order)
                if is_question:
                    return self._run_once(work, verb, path, deadline_s, is_question=False)
                raise UnavailableError(
                    f"cannot {what}: {error} from a NameNode that is not the active one any more"
                ) from error
            raise translate(error, what) from error

    def _leave(self, order: dict[str, str]) -> None:
        with self._lock:
            if self._order is order:
                self._client_or_none = None  # the next one begins with the active NameNode

    def _told_apart(self, error: BootseerError) -> BootseerError:
        """`error`, or that all DataNodes are full, where it may mean that, and they are."""
        count = refused_datanode_count(error)
        if count and self._space.is_full(count, self._options.block_size_bytes):
            return NoSpaceError(f"{error} No DataNode has room: remove files, or add DataNodes")
        return error

    def client(self) -> "Client":
        """The connection, made by the first call (so that opening a store costs nothing)."""
        with self._lock:
            if self._client_or_none is None:
                from hdfs_native import Client

                self._found.check()
                self._order = self._found.order()
                _outlive_inherited_connections()
                config = {
                    # A DataNode that hangs is left in time for another replica to be tried.
                    "dfs.client.socket-timeout": str(int(self.deadline_s * 500)),
                    # On a cluster with no DataNode to spare, a write goes on with those that
                    # are left (and the NameNode replicates later) rather than fail.
                    f"{_REPLACE_DATANODE}.best-effort": "true",
                    **self._order,
                }
                try:
                    self._client_or_none = Client(self._cluster, config)
                    _Fork.clients.add(self._client_or_none)
                except (RuntimeError, ValueError) as error:
                    raise InvalidInputError(f"cannot use {self._cluster}: {error}") from error
            return self._client_or_none

    def mode(self, client: "Client") -> int:
        """Permission bits for folders: the root's, but never write for others."""
        if self._mode_or_none is None:
            try:
                mode = client.get_file_info(self._root).permission
            except FileNotFoundError:
                client.mkdirs(self._root, 0o700, True)
                mode = 0o700
            self._mode_or_none = mode & 0o775 | 0o700
        return self._mode_or_none

    def _write_options(self, overwrite: bool, replication: int | None) -> Any:
        from hdfs_native import WriteOptions

        return WriteOptions(
            block_size=self._options.block_size_bytes,
            replication=replication or self._options.replication,
            permission=self.mode(self.client()) & 0o664,
            overwrite=overwrite,
            create_parent=True,
        )

    def recover_lease(self, path: str) -> None:
        """Have the NameNode close a file that is being written, with what the DataNodes have of it.

        Raises: DeadlineError and other BootseerErrors.
        """
        full = self.full(path)
        # At first a block's report is all it waits for, later a DataNode, and each question may
        # make the NameNode begin anew.
        attempts = Attempts(SOON, self.deadline_s)
        late = DeadlineError(
            f"cannot write {self.name(path)}: no DataNode gave its last block within "
            f"{self.deadline_s:g} s"
        )
        while not self.call(lambda client: client.recover_lease(full), "write", path):
            pause_s = attempts.pause_s(late)
            if pause_s is None:
                raise late
            time.sleep(pause_s)

    def close(self) -> None:
        """Release connections and threads. Idempotent."""
        self._caller.close()
        self._data_nodes.close()
        self._client_or_none = None


class _Fork:
    """When this process was forked from one that was talking to HDFS; 0.0: it was not."""

    parent_has_client = False
    time_s = 0.0
    clients: ClassVar["WeakSet[Client]"] = WeakSet()
    """This process's own, or its parent's."""


def _note_fork() -> None:
    _Fork.time_s = time.monotonic() if _Fork.parent_has_client else 0.0
    for client in list(_Fork.clients):
        # Never freed here: that would wait, with the GIL, for threads that stayed in the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client.inner))


def _collect_garbage() -> None:
    """Free what closed clients have left in circles: in the child that would wait for ever for
    threads that stayed in the parent."""
    if _Fork.parent_has_client:
        gc.collect()


os.register_at_fork(before=_collect_garbage, after_in_child=_note_fork)


def _outlive_inherited_connections() -> None:
    """A forked child would take its parent's connections for its own: two processes would read one
    stream, and wait for a reactor that stayed behind until the socket's time-out."""
    if _Fork.time_s:
        time.sleep(max(0.0, _Fork.time_s + _CONNECTION_KEPT_S - time.monotonic()))
        _Fork.time_s = 0.0
    _Fork.parent_has_client = True


def begin_direct(connection: HdfsConnection, path: str, kind: ChecksumKind) -> DirectFile | None:
    """The file at `path`, of which nothing was written; None if it was not placed, or if its
    DataNode does not take it so. hdfs-native, which is then given the same block, knows more ways.
    """
    full = connection.full(path)
    placed = connection.placer.take_placed(full)
    if placed is None:
        return None
    try:
        block_bytes = placed.name_node.plain_block_bytes(full)
        if block_bytes:
            silence_max_s = connection.deadline_s * _SILENCE_SHARE
            return DirectFile(placed, block_bytes, silence_max_s, kind)
    except (*UNANSWERED, BootseerError) as error:
        _log.debug("%s is not written directly to DataNodes: %s", path, error)
    return None
