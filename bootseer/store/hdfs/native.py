"""Wrapper of hdfs-native (Rust, no JVM) with deadlines, fork support and translated errors.

The only module that uses the client of hdfs-native 0.14.7. The client raises builtin exceptions in
three common cases, and RuntimeError with the Java class in its text in all others; `translate` maps
them all. Kerberos is handled by the client, with libgssapi; this module translates its failures.

The client blocks without an end while a NameNode is silent. So every call has a deadline, and when
the active NameNode has changed meanwhile, a new client is made for the new one.

Any thread. A forked child starts without a client.
"""

import ctypes
import gc
import math
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakSet

from bootseer.base.requests import NAMENODE, count_request
from bootseer.base.wait_budget import WAIT_BUDGET, AwayError
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.store.deadline import Call, DeadlineCaller, reset_in_children
from bootseer.store.hdfs.namenode import (
    OUT_OF_ROOM,
    RPC_TEXT,
    TOO_FEW_DATANODES,
    NameNodes,
    is_not_serving,
)
from bootseer.transfer.policy import REQUEST, SOON, UNTIL_DEADLINE, Attempts

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader

Result = TypeVar("Result")

# hdfs-native keeps idle connections to DataNodes for 3 s, in the whole process.
_CONNECTION_KEPT_S = 3.1
_REPLACE_DATANODE = "dfs.client.block.write.replace-datanode-on-failure"


class Native:
    """Client of one cluster, by hdfs-native, for the files below the folder `root`.

    In all methods, `name` is the name of the file in messages; paths are absolute.
    """

    def __init__(
        self,
        cluster: str,
        root: str,
        name_nodes: NameNodes,
        *,
        deadline_s: float,
        block_bytes: int | None = None,
        replication: int | None = None,
    ) -> None:
        """Prepare the client without a request.

        `block_bytes` and `replication` apply to new files; None means the cluster's default.
        """
        self._cluster = cluster
        self._root = root
        self._name_nodes = name_nodes
        self.deadline_s = deadline_s
        self.patience_s = 0.0
        """Longest wait for NameNodes that are not ready; 0 means the deadline of the call."""
        self._block_bytes = block_bytes
        self._replication = replication
        self._mode: int | None = None
        self._caller = DeadlineCaller("bootseer-hdfs")
        self._client: Client | None = None
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Start without a client; a forked child calls this."""
        if self._client is not None:
            leak(self._client)
        self._lock = threading.Lock()
        self._client = None
        self._order: dict[str, str] = {}

    def close(self) -> None:
        """Release the client and idle threads. Idempotent."""
        self._caller.close()
        self._client = None

    def call(
        self,
        function: "Callable[[Client], Result]",
        verb: str,
        name: str,
        *,
        is_idempotent: bool = False,
    ) -> Result:
        """Return the result of `function(client)` within the deadline.

        Errors contain `verb` and `name`. `is_idempotent`: see `run`.
        """
        return self.run(lambda _: function(self.client()), verb, name, is_idempotent=is_idempotent)

    def run(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        name: str,
        *,
        deadline_s: float | None = None,
        is_idempotent: bool = False,
    ) -> Result:
        """Return the result of `work`, which reports progress to its call, within the deadline.

        Errors contain `verb` and `name`. `is_idempotent` says that the work is idempotent: it is
        repeated if the active NameNode has changed, or if the connection to it was lost. NameNodes
        that are not ready are waited for until the deadline, or for `patience_s`; a start waits
        for them as for one that does not answer.
        """
        deadline_s = deadline_s or self.deadline_s
        attempts = Attempts(UNTIL_DEADLINE, self.patience_s or deadline_s)
        failed_s = math.inf
        while True:
            try:
                return self._run_once(work, verb, name, deadline_s, is_idempotent=is_idempotent)
            except UnavailableError as error:
                may_repeat = is_not_serving(error.__cause__) or (
                    is_idempotent and _may_ask_again(error.__cause__, attempts.failures_count)
                )
                if not may_repeat:
                    raise
                failed_s = min(failed_s, time.monotonic())
                waited_s = time.monotonic() - failed_s
                pause_s = attempts.pause_s(error)
                if pause_s is None or waited_s + pause_s >= WAIT_BUDGET.left_s:
                    WAIT_BUDGET.spend(waited_s)
                    raise
                time.sleep(pause_s)

    def _run_once(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        name: str,
        deadline_s: float,
        *,
        is_idempotent: bool,
    ) -> Result:
        connection_error: OSError | None = None
        count_request(NAMENODE)

        def check_connection() -> None:
            nonlocal connection_error
            connection_error = self._name_nodes.connection_error() or connection_error

        what = f"{verb} {name}"
        order = self._order

        def translated(call: Call[Result]) -> Result:
            try:
                return work(call)
            except BaseException as error:  # PanicException is not an Exception
                raise self._as_full_cluster(translate(error, what)) from error

        # Exceptions of the waiting thread, such as KeyboardInterrupt, are not translated.
        try:
            return self._caller.run(translated, deadline_s, on_wait=check_connection)
        except AwayError as error:
            raise translate(error, what) from error
        except DeadlineError as error:
            check_connection()
            if connection_error is not None:
                # The NameNode may be back by now; hdfs-native may not have noticed.
                raise UnavailableError(
                    f"cannot {what}: {error}, and no NameNode took a connection "
                    f"({connection_error})"
                ) from connection_error
            if self._name_nodes.has_moved(order):
                with self._lock:
                    if self._order is order:
                        self._client = None  # the next client begins with the active NameNode
                if is_idempotent:
                    return self._run_once(work, verb, name, deadline_s, is_idempotent=False)
                raise UnavailableError(
                    f"cannot {what}: {error} from a NameNode that is not the active one any more"
                ) from error
            raise translate(error, what) from error

    def _as_full_cluster(self, error: BootseerError) -> BootseerError:
        """Return `error`, or NoSpaceError if no DataNode was found because all are full."""
        match = _NO_DATANODE.search(str(error))
        if match and self._name_nodes.is_full(int(match[1]), self._block_bytes):
            return NoSpaceError(f"{error} No DataNode has room: remove files, or add DataNodes")
        return error

    def client(self) -> "Client":
        """Return the client, which the first call creates. Call this only inside the work of `run`.

        Raises: as `NameNodes.check`; UnsupportedError if the Kerberos library is missing;
        InvalidInputError.
        """
        with self._lock:
            if self._client is None:
                from hdfs_native import Client

                if self._name_nodes.check():
                    _check_kerberos_library()
                self._order = self._name_nodes.order()
                _outlive_inherited_connections()
                config = {
                    # A DataNode that hangs is given up in time to try another replica.
                    "dfs.client.socket-timeout": str(int(self.deadline_s * 500)),
                    # On a cluster without a spare DataNode, a write continues with the remaining
                    # ones instead of failing; the NameNode replicates later.
                    f"{_REPLACE_DATANODE}.best-effort": "true",
                    **self._order,
                }
                try:
                    self._client = Client(self._cluster, config)
                    _Fork.clients.add(self._client)
                except (RuntimeError, ValueError) as error:
                    raise InvalidInputError(f"cannot use {self._cluster}: {error}") from error
            return self._client

    def folder_mode(self, client: "Client") -> int:
        """Return the mode of new folders: the root's bits without write for others."""
        if self._mode is None:
            try:
                mode = client.get_file_info(self._root).permission
            except FileNotFoundError:
                client.mkdirs(self._root, 0o700, True)
                mode = 0o700
            self._mode = mode & 0o775 | 0o700
        return self._mode

    def create(
        self, path: str, name: str, *, overwrite: bool, replication: int | None = None
    ) -> Any:
        """Create a file, and return hdfs-native's writer. Raises: AlreadyExistsError."""

        def begin(client: "Client") -> Any:
            from hdfs_native import WriteOptions

            options = WriteOptions(
                block_size=self._block_bytes,
                replication=replication or self._replication,
                permission=self.folder_mode(client) & 0o664,
                overwrite=overwrite,
                create_parent=True,
            )
            # `inner`, since the finalizer of the Python wrapper (an io.RawIOBase) closes the file,
            # which would make a half-written file look complete.
            return client.inner.create(path, options)

        return self.call(begin, "create", name)

    def recover_lease(self, path: str, name: str) -> None:
        """Ask the NameNode to close a file that is being written, with the bytes received so far.

        Raises: BootseerError.
        """
        # The NameNode first waits for the report of a block, later for a DataNode. Each call may
        # make it start again, so the pauses grow.
        attempts = Attempts(SOON, self.deadline_s)
        late = DeadlineError(
            f"cannot write {name}: no DataNode gave its last block within {self.deadline_s:g} s"
        )
        while not self.call(lambda client: client.recover_lease(path), "write", name):
            attempts.wait(late)


# ---- failures ------------------------------------------------------------------------------------

# The first entry whose text occurs in the message decides. Order matters: HDFS reports a file where
# a folder is expected as an AccessControlException.
_TEXTS: tuple[tuple[str, type[BootseerError]], ...] = (
    ("ParentNotDirectoryException", InvalidInputError),
    ("(is not a directory)", NotFoundError),
    ("PathIsNotEmptyDirectoryException", AlreadyExistsError),
    ("AccessControlException", PermissionDeniedError),
    # Quotas of space and of names, and by type of storage.
    ("QuotaExceededException", QuotaExceededError),
    ("QuotaByStorageTypeExceededException", QuotaExceededError),
    (OUT_OF_ROOM, NoSpaceError),
    ("InvalidPathException", InvalidInputError),
    ("FSLimitException", InvalidInputError),
    ("must both be directories", InvalidInputError),
    ("is a directory or file under source", InvalidInputError),
    ("less than configured minimum value", InvalidInputError),
    ("ChecksumError", CorruptError),
)
# Stack trace of the server, in both forms in which the client shows it.
_TRACE = re.compile(r"(\\n|\n)\s*(\\t|\t)?\s*at [\w$.]+\(.*", re.DOTALL)
_REASON_MAX_CHARACTERS = 300
_NO_DATANODE = re.compile(TOO_FEW_DATANODES + r" 0 of .*?There are (\d+) datanode")
# The connection was lost during a call, which may have been executed.
_UNANSWERED = "RPC listener disconnected"
# A NameNode that has just become active may not know yet where the latest blocks are. Hadoop's own
# client asks again for some seconds, hdfs-native does not.
_UNPLACED = "All DataNodes failed: []"


def translate(error: BaseException, what: str) -> BootseerError:
    """Return the BootseerError for an exception of hdfs-native.

    `what` ("read hdfs://...") precedes the reason in the message. An exception that is not in the
    table becomes UnavailableError: a later attempt, or another replica, may succeed.
    """
    if isinstance(error, BootseerError):
        return type(error)(f"cannot {what}: {error}")
    text = str(error)
    message = f"cannot {what}: {_reason(text)}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(message)
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(message)
    if isinstance(error, PermissionError):
        return PermissionDeniedError(message)
    if isinstance(error, UnicodeError):
        return InvalidInputError(f"cannot {what}: HDFS names are UTF-8")
    if isinstance(error, OSError) and error.errno:
        return from_oserror(error, what)
    if failure := _kerberos_failure(text):
        return failure[0](f"cannot {what}: {failure[1]}")
    for part, kind in _TEXTS:
        if part in text:
            return kind(message)
    return UnavailableError(message)


def _may_ask_again(cause: BaseException | None, failures_count: int) -> bool:
    """Return whether an idempotent call that failed with `cause` should be repeated."""
    if _UNPLACED in str(cause):
        # Limited, since all replicas may be lost for good.
        return failures_count + 1 < REQUEST.attempts
    is_os_error = isinstance(cause, OSError) and not isinstance(cause, BootseerError)
    return is_os_error or _UNANSWERED in str(cause)


def _reason(text: str) -> str:
    text = _TRACE.sub("", text)
    if match := RPC_TEXT.match(text):
        text = f"{match[1]}: {match[2]}"
    text = " ".join(text.replace("\\n", " ").split()).rstrip('")')
    if len(text) > _REASON_MAX_CHARACTERS:
        text = text[:_REASON_MAX_CHARACTERS] + "..."
    return text or "the HDFS client gave no reason"


KERBEROS_LIBRARY = "libgssapi_krb5.so.2"
# Rust shows GSSAPIError(codes, number, "general text: particular reason").
_GSSAPI = re.compile(r'GSSAPIError\(.*?, \d+, "(.*)', re.DOTALL)
_GENERAL = re.compile(r".*(?:more information|unavailable or inaccessible|supplied): ?", re.DOTALL)
_SASL = re.compile(r'SaslException", "(.*)', re.DOTALL)
_KERBEROS_REASON_MAX_CHARACTERS = 200


def _check_kerberos_library() -> None:
    """Raise UnsupportedError if this machine lacks the library that hdfs-native needs."""
    try:
        ctypes.CDLL(KERBEROS_LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            f"Kerberos needs {KERBEROS_LIBRARY}, which cannot be loaded: install "
            "libgssapi-krb5-2 (Debian) or krb5-libs (Red Hat)"
        ) from error


def _kerberos_failure(text: str) -> tuple[type[BootseerError], str] | None:
    """Return the error class and the reason of a Kerberos failure; None for any other `text`."""
    if match := _GSSAPI.search(text):
        reason = _kerberos_reason(_GENERAL.sub("", match[1]))
        if "Cannot contact any KDC" in reason:
            return UnavailableError, f"no Kerberos server answers ({reason})"
        return (
            PermissionDeniedError,
            f"no Kerberos ticket that can be used ({reason}): run kinit, or let KRB5_CLIENT_KTNAME "
            "name a keytab",
        )
    if match := _SASL.search(text):
        reason = _kerberos_reason(match[1])
        return PermissionDeniedError, f"the server does not accept the Kerberos ticket ({reason})"
    return None


def _kerberos_reason(text: str) -> str:
    text = " ".join(text.removesuffix('")').replace('\\"', '"').replace("\\n", " ").split())
    return text[:_KERBEROS_REASON_MAX_CHARACTERS]


# ---- forks ---------------------------------------------------------------------------------------


class _Fork:
    """State of hdfs-native that matters when this process forks."""

    has_client = False
    """Whether this process, or one from which it was forked, has used HDFS."""
    time_s = 0.0
    """Time at which this process was forked from one that used HDFS; 0.0 if it was not."""
    clients: ClassVar["WeakSet[Client]"] = WeakSet()
    """Clients of this process, or of its parent."""


def _collect_garbage() -> None:
    """Free closed clients in reference cycles before a fork.

    Freeing them in the child would wait for ever for threads that stayed in the parent.
    """
    if _Fork.has_client:
        gc.collect()


def _begin_in_child() -> None:
    _Fork.time_s = time.monotonic() if _Fork.has_client else 0.0
    for client in list(_Fork.clients):
        leak(client)


def leak(handle: "Client | FileReader") -> None:
    """Keep a client or file of the parent process from being freed, for ever.

    Freeing it would wait, with the GIL held, for threads that stayed in the parent.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle.inner))


os.register_at_fork(before=_collect_garbage, after_in_child=_begin_in_child)


def _outlive_inherited_connections() -> None:
    """Wait in a forked child until hdfs-native has dropped the connections of the parent.

    Two processes would otherwise read from one stream, and wait for the parent's reactor until the
    socket's timeout.
    """
    if _Fork.time_s:
        time.sleep(max(0.0, _Fork.time_s + _CONNECTION_KEPT_S - time.monotonic()))
        _Fork.time_s = 0.0
    _Fork.has_client = True
