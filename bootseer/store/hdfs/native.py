"""hdfs-native (Rust, no JVM) within deadlines, across forks, and with its failures in words.

Alone owns the client of hdfs-native 0.14.7, of which this is the one table of failures: it raises
builtin exceptions in three common cases, and RuntimeError, whose text holds the Java class, in all
others. Kerberos is the client's work, by libgssapi; here is only what goes wrong with it.

The client blocks without an end where a NameNode is silent, and does not say why. So a deadline
ends every call, and an active NameNode that has fallen silent is left for the one that is active
now.

Any thread. A forked child begins with a client of its own.
"""

import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakSet

from bootseer.base.requests import NAMENODE, count_request
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
from bootseer.store.deadline import Call, DeadlineCaller, begin_in_children
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

# More parallel calls than any plan of ours makes; a call that is stuck keeps one.
_THREADS_MAX = 128
# hdfs-native keeps DataNodes' connections for 3 s, for the whole process.
_CONNECTION_KEPT_S = 3.1
_REPLACE_DATANODE = "dfs.client.block.write.replace-datanode-on-failure"


class Native:
    """hdfs-native as the client of one cluster, for what lies below the folder `root`.

    In all calls `name` is what messages call the file; paths are absolute.
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
        """`block_bytes`, `replication`: of new files; None: as the cluster has them."""
        self._cluster = cluster
        self._root = root
        self._name_nodes = name_nodes
        self.deadline_s = deadline_s
        self.patience_s = 0.0
        """How long NameNodes that are not ready are waited for; 0: the deadline of the call."""
        self._block_bytes = block_bytes
        self._replication = replication
        self._mode: int | None = None
        self._caller = DeadlineCaller(_THREADS_MAX, "bootseer-hdfs")
        self._client: Client | None = None
        self.begin()
        begin_in_children(self)

    def begin(self) -> None:
        """Start without a client, as a forked child has to."""
        if self._client is not None:
            keep_for_ever(self._client)
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
        is_question: bool = False,
    ) -> Result:
        """Return what `function` returns, within the deadline; errors say `verb` and `name`."""
        return self.run(lambda _: function(self.client()), verb, name, is_question=is_question)

    def run(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        name: str,
        *,
        deadline_s: float | None = None,
        is_question: bool = False,
    ) -> Result:
        """Run work that reports its progress, within the deadline; errors say `verb` and `name`.

        `is_question`: doing the work twice changes no more than doing it once, and it is done again
        where a NameNode was left meanwhile, or had no time to answer.

        A NameNode that is not ready yet is waited for, until the deadline or for `patience_s`.
        """
        deadline_s = deadline_s or self.deadline_s
        attempts = Attempts(UNTIL_DEADLINE, self.patience_s or deadline_s)
        while True:
            try:
                return self._run_once(work, verb, name, deadline_s, is_question=is_question)
            except UnavailableError as error:
                may_repeat = is_not_serving(error.__cause__) or (
                    is_question and _may_ask_again(error.__cause__, attempts.failures_count)
                )
                pause_s = attempts.pause_s(error) if may_repeat else None
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def _run_once(
        self,
        work: Callable[[Call[Result]], Result],
        verb: str,
        name: str,
        deadline_s: float,
        *,
        is_question: bool,
    ) -> Result:
        refusal: OSError | None = None
        count_request(NAMENODE)

        def look() -> None:
            nonlocal refusal
            refusal = self._name_nodes.refusal() or refusal

        what = f"{verb} {name}"
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
            if self._name_nodes.has_left(order):
                with self._lock:
                    if self._order is order:
                        self._client = None  # the next one begins with the active NameNode
                if is_question:
                    return self._run_once(work, verb, name, deadline_s, is_question=False)
                raise UnavailableError(
                    f"cannot {what}: {error} from a NameNode that is not the active one any more"
                ) from error
            raise translate(error, what) from error

    def _told_apart(self, error: BootseerError) -> BootseerError:
        """`error`, or that all DataNodes are full, where it may mean that, and they are."""
        match = _NO_DATANODE.search(str(error))
        if match and self._name_nodes.is_full(int(match[1]), self._block_bytes):
            return NoSpaceError(f"{error} No DataNode has room: remove files, or add DataNodes")
        return error

    def client(self) -> "Client":
        """Return the client, made by the first call (so that opening a store costs nothing).

        Only for work that `run` does. Raises: as `NameNodes.check`; UnsupportedError: the library
        for Kerberos is missing; InvalidInputError.
        """
        with self._lock:
            if self._client is None:
                from hdfs_native import Client

                if self._name_nodes.check():
                    _check_kerberos_library()
                self._order = self._name_nodes.order()
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
                    self._client = Client(self._cluster, config)
                    _Fork.clients.add(self._client)
                except (RuntimeError, ValueError) as error:
                    raise InvalidInputError(f"cannot use {self._cluster}: {error}") from error
            return self._client

    def folder_mode(self, client: "Client") -> int:
        """Return the permission bits for folders: the root's, but never write for others."""
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
        """Begin a file; returns hdfs-native's own writer. Raises: AlreadyExistsError."""

        def begin(client: "Client") -> Any:
            from hdfs_native import WriteOptions

            options = WriteOptions(
                block_size=self._block_bytes,
                replication=replication or self._replication,
                permission=self.folder_mode(client) & 0o664,
                overwrite=overwrite,
                create_parent=True,
            )
            # `inner`: the Python wrapper is an io.RawIOBase, whose finalizer closes, which would
            # make a half-written file look complete.
            return client.inner.create(path, options)

        return self.call(begin, "create", name)

    def recover_lease(self, path: str, name: str) -> None:
        """Close a file that is being written, by the NameNode, with the bytes that DataNodes have.

        Raises: DeadlineError and other BootseerErrors.
        """
        # At first a block's report is all it waits for, later a DataNode, and each question may
        # make the NameNode begin anew.
        attempts = Attempts(SOON, self.deadline_s)
        late = DeadlineError(
            f"cannot write {name}: no DataNode gave its last block within {self.deadline_s:g} s"
        )
        while not self.call(lambda client: client.recover_lease(path), "write", name):
            pause_s = attempts.pause_s(late)
            if pause_s is None:
                raise late
            time.sleep(pause_s)


# ---- failures ------------------------------------------------------------------------------------

# The first text that is found decides. Order matters: HDFS reports a file in the place of a
# folder as an AccessControlException.
_TEXTS: tuple[tuple[str, type[BootseerError]], ...] = (
    ("ParentNotDirectoryException", InvalidInputError),
    ("(is not a directory)", NotFoundError),
    ("PathIsNotEmptyDirectoryException", AlreadyExistsError),
    ("AccessControlException", PermissionDeniedError),
    # Of space, of names, and by type of storage.
    ("QuotaExceededException", QuotaExceededError),
    ("QuotaByStorageTypeExceededException", QuotaExceededError),
    # The NameNode has put itself into safe mode.
    (OUT_OF_ROOM, NoSpaceError),
    ("InvalidPathException", InvalidInputError),
    ("FSLimitException", InvalidInputError),
    ("must both be directories", InvalidInputError),
    ("is a directory or file under source", InvalidInputError),
    ("less than configured minimum value", InvalidInputError),
    ("ChecksumError", CorruptError),
)
# The trace of the server's stack, in both forms in which the client shows it.
_TRACE = re.compile(r"(\\n|\n)\s*(\\t|\t)?\s*at [\w$.]+\(.*", re.DOTALL)
_REASON_MAX_CHARACTERS = 300
_NO_DATANODE = re.compile(TOO_FEW_DATANODES + r" 0 of .*?There are (\d+) datanode")
# The connection was lost in the middle of a call, which may have been made.
_UNANSWERED = "RPC listener disconnected"
# A NameNode that has just become active may not have heard yet who has the latest blocks. Hadoop's
# own client asks again for some seconds, hdfs-native does not.
_UNPLACED = "All DataNodes failed: []"


def translate(error: BaseException, what: str) -> BootseerError:
    """Return an error of hdfs-native as one of ours, with `what` ("read hdfs://...") before the
    reason.

    What is not in the table is UnavailableError: the server failed in a way that a later try,
    or another replica, may not.
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
    """Tell whether a question whose `cause` of failure this is may have an answer soon."""
    is_gone = isinstance(cause, OSError) and not isinstance(cause, BootseerError)
    if _UNPLACED in str(cause):
        # Or all replicas are lost, and this is the answer.
        return failures_count + 1 < REQUEST.attempts
    return is_gone or _UNANSWERED in str(cause)


def _reason(text: str) -> str:
    text = _TRACE.sub("", text)
    if match := RPC_TEXT.match(text):
        text = f"{match[1]}: {match[2]}"
    text = " ".join(text.replace("\\n", " ").split()).rstrip('")')
    if len(text) > _REASON_MAX_CHARACTERS:
        text = text[:_REASON_MAX_CHARACTERS] + "..."
    return text or "the HDFS client gave no reason"


KERBEROS_LIBRARY = "libgssapi_krb5.so.2"
# GSSAPIError(codes, number, "general text: what it is about"): as Rust shows it.
_GSSAPI = re.compile(r'GSSAPIError\(.*?, \d+, "(.*)', re.DOTALL)
_GENERAL = re.compile(r".*(?:more information|unavailable or inaccessible|supplied): ?", re.DOTALL)
_SASL = re.compile(r'SaslException", "(.*)', re.DOTALL)
_KERBEROS_REASON_MAX_CHARACTERS = 200


def _check_kerberos_library() -> None:
    """Raises: UnsupportedError: this machine lacks what hdfs-native needs for Kerberos."""
    try:
        ctypes.CDLL(KERBEROS_LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            f"Kerberos needs {KERBEROS_LIBRARY}, which cannot be loaded: install "
            "libgssapi-krb5-2 (Debian) or krb5-libs (Red Hat)"
        ) from error


def _kerberos_failure(text: str) -> tuple[type[BootseerError], str] | None:
    """Return the kind and the reason of a failure of Kerberos; None for any other `text`."""
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
    """State of hdfs-native that forks are told of."""

    has_client = False
    """Whether this process, or one from which it was forked, talked to HDFS."""
    time_s = 0.0
    """When this process was forked from one that was talking to HDFS; 0.0: it was not."""
    clients: ClassVar["WeakSet[Client]"] = WeakSet()
    """This process's own, or its parent's."""


def _collect_garbage() -> None:
    """Free what closed clients have left in circles: in the child that would wait for ever for
    threads that stayed in the parent."""
    if _Fork.has_client:
        gc.collect()


def _begin_in_child() -> None:
    _Fork.time_s = time.monotonic() if _Fork.has_client else 0.0
    for client in list(_Fork.clients):
        keep_for_ever(client)


def keep_for_ever(parents: "Client | FileReader") -> None:
    """Keep a parent's client or file: freeing it waits, with the GIL, for threads that stayed in
    the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents.inner))


os.register_at_fork(before=_collect_garbage, after_in_child=_begin_in_child)


def _outlive_inherited_connections() -> None:
    """A forked child would take its parent's connections for its own: two processes would read one
    stream, and wait for a reactor that stayed behind until the socket's time-out."""
    if _Fork.time_s:
        time.sleep(max(0.0, _Fork.time_s + _CONNECTION_KEPT_S - time.monotonic()))
        _Fork.time_s = 0.0
    _Fork.has_client = True
