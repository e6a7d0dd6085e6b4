"""Client of an HDFS cluster's NameNodes, for calls that hdfs-native lacks.

hdfs-native 0.14.7 does not tell the places of blocks or the free space, cannot choose DataNodes,
and has no `concat`. These calls are made by Hadoop's RPC, version 9, with simple authentication,
one call per connection. A call whose connection broke is repeated with the same client and call id,
so that the NameNode's retry cache executes the call once.

`NameNodes` also finds the active NameNode; finds out once per cluster whether such calls are
accepted (not with Kerberos, where only hdfs-native is used); explains why no NameNode is reachable;
and tells a full cluster from a dead one.

Any thread. Every wait has a deadline; an answer is bounded as a whole, in time and in size.
"""

import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.base.requests import NAMENODE, count_request
from bootseer.base.varints import delimited, take_delimited
from bootseer.base.wait_budget import WAIT_BUDGET, RefusedError
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.store.backend import Space
from bootseer.store.deadline import reset_in_children
from bootseer.store.hdfs.messages import (
    MESSAGES,
    PROTOCOL,
    RPC_BEGIN,
    SUCCESS,
    Message,
    encoded,
    parse,
)
from bootseer.transfer.policy import (
    ONCE,
    OUTAGE_DEADLINES,
    REQUEST,
    SOON,
    UNTIL_DEADLINE,
    Attempts,
)

_log = logging.getLogger(__name__)

_FRAME_MAX_BYTES = 1 << 20
# Longest class name, and longest message with a stack trace, of a NameNode's exception.
_TEXT_MAX_BYTES = 64 << 10
_PROTOCOL_BUFFERS, _ORDINARY_CALL, _CONTEXT_CALL_ID = 2, 0, -3
# Time to connect to one of several NameNodes; TCP sends its SYN three times meanwhile.
_CONNECT_S = 5.0

# Range whose blocks are asked for first; no part is longer. Blocks have a megabyte or more, so that
# the answer for 1000 blocks stays below `_FRAME_MAX_BYTES`.
_LOCATED_BYTES = 1000 << 20
# With blocks of at least this size, 1000 times this size is asked for in a second call.
_LARGE_BLOCK_BYTES = 64 << 20

_DEFAULT_PORT = 8020
_SHORT_S = 5.0
_CHECK_S = 2.0
# Time after which NameNodes that did not answer are asked again.
SILENT_S = 60.0
# Time for a NameNode to restart or a name to resolve; after that the address is taken for wrong.
_REACH_S = 10.0
_REACH_CONNECT_S = 3.0
_KERBEROS_REQUIRED = "SIMPLE authentication is not enabled"
_NAMES, _ADDRESS = "dfs.ha.namenodes.", "dfs.namenode.rpc-address."
_CONFIG_FILES = ("core-site.xml", "hdfs-site.xml")

_SPACE_S = 10.0
# "No quota" is -1 as an unsigned 64-bit number. Asking for the quota is expensive for the NameNode,
# which walks through the directory.
_NO_QUOTA = 2**63
_NO_QUOTA_S = 3600.0
# Full blocks for which a DataNode must have room before the NameNode chooses it, roughly: the new
# block, the blocks that are being written to it, and those that failed in the last minutes.
_ROOM_BLOCKS = 16

# Exceptions of a NameNode that has executed nothing and will serve calls a little later: it was
# just started, or is about to become active.
_NOT_SERVING = ("SafeModeException", "RetriableException", "StandbyException")
OUT_OF_ROOM = "Resources are low on NN"
"""Message of a NameNode in safe mode for lack of disk space."""
TOO_FEW_DATANODES = "could only be written to"
"""Message if too few DataNodes were found for a block: others are excluded, full, dead or busy."""
RPC_TEXT = re.compile(r'RPCError\("[\w.$]*?([\w$]+)", "(.*)', re.DOTALL)
"""Class and message of a NameNode's exception in the text of an error of hdfs-native."""

Address = tuple[str, int]


class NoCallsError(OSError):
    """Raised if no known NameNode accepts calls from us: Kerberos is required, or none answered."""


class RpcError(Exception):
    """Exception of a NameNode; the text begins with its Java class."""


class NotHadoopError(ConnectionError):
    """Raised if the answer is not a frame of Hadoop's RPC: another server uses the port."""


UNANSWERED = (RpcError, OSError, ValueError)
"""Exceptions of a call that gave no usable answer, for callers that can go on without one."""


def is_not_serving(error: BaseException | None) -> bool:
    """Return whether a NameNode has executed nothing and the call should be repeated.

    Such a NameNode is in safe mode, is starting, or is not the active one. `error` is from
    hdfs-native or from this module.
    """
    text = str(error)
    if OUT_OF_ROOM in text:
        return False
    # The message of a RetriableException contains the class of the wrapped exception.
    match = RPC_TEXT.match(text)
    raised = match[1] if match else text.partition(":")[0]
    return any(name in raised for name in _NOT_SERVING)


class Replica(Struct, frozen=True):
    """DataNode that has a block."""

    address: Address
    is_far: bool = False
    """Whether another replica is nearer to us, according to the NameNode."""


class StoredBlock(Struct, frozen=True):
    """Block of a file, and its replicas."""

    start: int
    """Offset of the block in the file."""
    block: Message
    """ExtendedBlock."""
    token: bytes
    """Block token, which DataNodes of some clusters require."""
    replicas: tuple[Replica, ...]
    """DataNodes with the block, the nearest one first."""

    @property
    def length(self) -> int:
        """Number of bytes in the block."""
        length: int = self.block.numBytes
        return length


class AddedBlock(Struct, frozen=True):
    """Newly allocated, empty block."""

    located: Message
    """LocatedBlock."""
    address: Address
    """Address of the first DataNode."""
    servers: dict[str, Message]
    """DataNodes (DatanodeInfo) by UUID, in the order of the write pipeline."""

    def block_of(self, size_bytes: int) -> Message:
        """Return the block's ExtendedBlock with the size `size_bytes`."""
        block = MESSAGES["ExtendedBlock"]()
        block.CopyFrom(self.located.b)
        block.numBytes = size_bytes
        return block


# ---- NameNodes -----------------------------------------------------------------------------------


class _ClusterConfig(Struct, frozen=True):
    """NameNodes of a cluster, from its URL and the Hadoop configuration of this machine."""

    addresses: tuple[Address, ...]
    names: tuple[str, ...]
    """Names of the NameNodes of a nameservice; empty for `hdfs://HOST:PORT`."""
    user: str
    is_secure: bool
    calls_by_name: bool
    """Whether DataNodes are contacted by host name instead of IP address."""


class _CallState(Enum):
    """Whether NameNodes accept our calls."""

    UNKNOWN = auto()
    """No NameNode has answered so far."""
    OPEN = auto()
    CLOSED = auto()
    """The configuration requires Kerberos, or calls are refused for another reason."""
    UNCONFIGURED = auto()
    """The cluster requires Kerberos, but the configuration of this machine does not say so."""


class CallWait(Enum):
    """Length of a call's wait for NameNodes that do not answer."""

    CHECK = auto()
    """One attempt of at most two seconds."""
    SHORT = auto()
    """Five seconds, for an answer that the caller can do without."""
    USUAL = auto()
    """The deadline."""
    LONG = auto()
    """Several deadlines, also for a NameNode that is not ready: without an answer a write fails."""


class NameNodes:
    """Client of the NameNodes of one cluster. Any thread.

    Every call raises one of UNANSWERED: NoCallsError if calls are not accepted from us, RpcError,
    UnavailableError, DeadlineError, or ValueError for a malformed answer. Paths are absolute.
    """

    def __init__(self, cluster: str, deadline_s: float) -> None:
        """Prepare without a request; `cluster`: `hdfs://HOST:PORT` or `hdfs://NAMESERVICE`."""
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._state = _CallState.UNKNOWN
        self._silent_until_s = 0.0
        self._config: _ClusterConfig | None = None
        """Set in the state OPEN."""
        self._first = 0
        """Index of the NameNode that answered last, which is asked first."""
        self._space: tuple[Space | None, float] = None, 0.0
        self._no_quota_until_s = 0.0
        self.reset()
        reset_in_children(self)

    def reset(self) -> None:
        """Replace the lock, which another thread of the parent may hold, in a forked child."""
        self._lock = threading.Lock()
        """Also held while the NameNodes are asked for the first time."""

    # ---- whether calls are accepted -------------------------------------------------------------

    def check(self) -> bool:
        """Return whether the configuration requires Kerberos, after checking that clients can work.

        Where they cannot, hdfs-native would retry until its deadline without naming the reason.

        Raises: UnavailableError if the address of the NameNode takes no connections or belongs to
        another server; PermissionDeniedError if the NameNode requires Kerberos and the
        configuration does not.
        """
        with self._lock:
            config = _cluster_config(self._cluster)
            if self._state is _CallState.UNKNOWN:
                if config.is_secure:
                    self._await_reachable(config)
                if error := self._probe(config, CallWait.CHECK):
                    self._await_reachable(config)
                    self._explain_silence(error)
            if self._state is _CallState.UNCONFIGURED:
                raise PermissionDeniedError(
                    f"{self._cluster} wants Kerberos: let HADOOP_CONF_DIR name the folder of its "
                    "core-site.xml and hdfs-site.xml"
                )
            return config.is_secure

    def take_calls(self) -> bool:
        """Return whether the active NameNode accepts our calls; with Kerberos it does not."""
        return self._config_if_open(CallWait.USUAL) is not None

    def _config_if_open(self, wait: CallWait) -> _ClusterConfig | None:
        """Return the configuration if NameNodes accept our calls, asking them if need be."""
        with self._lock:
            is_due = wait is CallWait.LONG or time.monotonic() >= self._silent_until_s
            if (
                self._state is _CallState.UNKNOWN
                and is_due
                and self._probe(_cluster_config(self._cluster), wait)
            ):
                self._silent_until_s = time.monotonic() + SILENT_S
            return self._config

    def _probe(self, config: _ClusterConfig, wait: CallWait) -> BootseerError | None:
        """Find out whether calls are accepted; return the error if no NameNode answers."""
        if config.is_secure:
            self._state = _CallState.CLOSED
            return None
        request = MESSAGES["GetFileInfoRequest"](src="/").SerializeToString()
        try:
            self._answer(config, "getFileInfo", request, wait)
        except RpcError as error:
            is_kerberos = _KERBEROS_REQUIRED in str(error)
            self._state = _CallState.UNCONFIGURED if is_kerberos else _CallState.CLOSED
        except BootseerError as error:
            return error
        else:
            self._state, self._config = _CallState.OPEN, config
        return None

    def _await_reachable(self, config: _ClusterConfig) -> None:
        """Wait until a NameNode takes a connection, and log the wait.

        hdfs-native would try for a minute without a message. Raises: UnavailableError with the
        reason of each NameNode.
        """
        limit_s = min(self._deadline_s, _REACH_S)
        attempts = Attempts(UNTIL_DEADLINE, limit_s, wait_budget=WAIT_BUDGET)
        hint = f"check the URL {public_url(self._cluster)}"
        if urlsplit(self._cluster).port is None and not config.names:
            hint += (
                ", or, for a nameservice, that HADOOP_CONF_DIR names the folder of hdfs-site.xml"
            )
        while failures := _connection_errors(
            config.addresses, min(_REACH_CONNECT_S, attempts.left_s)
        ):
            reasons = ", ".join(
                f"{host}:{port}: {_reason(error)}" for (host, port), error in failures.items()
            )
            is_unknown = all(
                isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                for error in failures.values()
            )
            is_refused = all(
                isinstance(error, ConnectionRefusedError) for error in failures.values()
            )
            kind = RefusedError if is_refused else UnavailableError
            error = kind(f"no NameNode can be reached ({reasons}); {hint}")
            pause_s = None if is_unknown else attempts.pause_s(error)
            if pause_s is None:
                WAIT_BUDGET.give_up()
                raise error
            if attempts.failures_count == 1 and not WAIT_BUDGET.awaits_first_answer:
                _log.warning("waiting up to %g s for a NameNode (%s)", limit_s, reasons)
            time.sleep(pause_s)

    def _explain_silence(self, error: BootseerError) -> None:
        """Raise or log the reason why a NameNode takes connections but does not answer."""
        cluster = public_url(self._cluster)
        if isinstance(error.__cause__, NotHadoopError):
            raise UnavailableError(
                f"{error}; check the port of {cluster}: the NameNode's RPC has mostly 8020, its "
                "web pages have another one"
            ) from error
        # A start waits a moment only, and its stage says so.
        if not WAIT_BUDGET.awaits_first_answer:
            _log.warning("waiting up to %g s for %s: %s", self._deadline_s, cluster, error)

    def connection_error(self) -> OSError | None:
        """Return the reason why no NameNode takes connections now, or None if one of them does.

        hdfs-native retries connections, so that its caller cannot tell a NameNode that is down from
        one that hangs.
        """
        timeout_s = min(_CHECK_S, WAIT_BUDGET.left_s)
        failures = list(
            _connection_errors(_cluster_config(self._cluster).addresses, timeout_s).values()
        )
        return failures[-1] if failures else None

    def order(self) -> dict[str, str]:
        """Return the configuration entry that lists the active NameNode first.

        The result is empty if fewer than two NameNodes are known. hdfs-native needs the order,
        since it waits for ever for a silent NameNode.
        """
        with self._lock:
            if self._config is None or len(self._config.names) < 2:
                return {}
            names = self._config.names[self._first :] + self._config.names[: self._first]
            return {_NAMES + (urlsplit(self._cluster).hostname or ""): ",".join(names)}

    def has_moved(self, order: dict[str, str]) -> bool:
        """Return whether another NameNode is active now than when `order` was returned."""
        if not order:
            return False
        try:
            self.call("getFileInfo", src="/")
        except UNANSWERED:
            return False
        return self.order() != order

    # ---- calls ----------------------------------------------------------------------------------

    def concat(self, target: str, sources: Sequence[str]) -> None:
        """Append the files `sources` to `target`, and remove them."""
        self.call("concat", CallWait.LONG, trg=target, srcs=sources)

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """Return the UUIDs of the DataNodes of the last block of `path`, which is being written."""
        found = self._block_locations(path, 1)
        blocks = [found.lastBlock] if found.HasField("lastBlock") else found.blocks[-1:]
        return tuple(_text(server.id.datanodeUuid) for block in blocks for server in block.locs)

    def is_being_written(self, path: str) -> bool:
        """Return whether a client has the file open for writing.

        Raises: RpcError with FileNotFoundException in its text if there is no such file.
        """
        return bool(self._block_locations(path, 1, CallWait.USUAL).underConstruction)

    def stored_blocks(self, path: str) -> tuple[StoredBlock, ...]:
        """Return up to about a thousand of the first blocks of a file, in order.

        The result is empty if the file is encrypted, erasure-coded or being written: its blocks do
        not contain its plain bytes then.
        """
        found = self._block_locations(path, _LOCATED_BYTES)
        if found.underConstruction or not _is_plain(found):
            return ()
        if found.blocks and found.blocks[0].b.numBytes >= _LARGE_BLOCK_BYTES:
            last = found.blocks[-1]
            if last.offset + last.b.numBytes >= _LOCATED_BYTES:
                found = self._block_locations(path, 1000 * _LARGE_BLOCK_BYTES)
        return tuple(
            StoredBlock(one.offset, one.b, one.blockToken, self._replicas(one))
            for one in found.blocks
        )

    def _block_locations(self, path: str, end: int, wait: CallWait = CallWait.SHORT) -> Message:
        return self.call("getBlockLocations", wait, src=path, offset=0, length=end).locations

    def _replicas(self, block: Message) -> tuple[Replica, ...]:
        servers: Sequence[Message] = () if block.corrupt else block.locs
        return tuple(
            Replica(self._address(server), server.location != servers[0].location)
            for server in servers
        )

    def _address(self, server: Message) -> Address:
        by_name = self._config is not None and self._config.calls_by_name
        host = server.id.hostName if by_name else server.id.ipAddr
        return _text(host), server.id.xferPort

    def add_block(
        self, path: str, holder: str, excluded: Sequence[Message] = (), previous: Message = None
    ) -> AddedBlock:
        """Allocate the next block of a file that `holder` is writing, not on `excluded` DataNodes.

        Without `previous`, that is the first block. With it, the call waits until the DataNodes
        have reported the block `previous`.
        """
        wait = CallWait.SHORT if previous is None else CallWait.LONG
        attempts = Attempts(SOON, self._deadline_s)
        fields = {"src": path, "clientName": holder, "previous": previous, "excludeNodes": excluded}
        while True:
            try:
                located = self.call("addBlock", wait, **fields).block
                break
            except RpcError as error:
                if "NotReplicatedYet" not in str(error):
                    raise
                _wait_for_reports(attempts, error)
        if not located.locs:
            raise ValueError("a block without DataNodes")
        servers = {_text(server.id.datanodeUuid): server for server in located.locs}
        return AddedBlock(located, self._address(located.locs[0]), servers)

    def abandon_block(self, path: str, holder: str, block: Message) -> None:
        """Give back a block that `add_block` allocated."""
        self.call("abandonBlock", b=block, src=path, holder=holder)

    def complete(self, path: str, holder: str, last: Message) -> None:
        """Close a file with its `last` block once the DataNodes have reported all blocks."""
        attempts, fields = Attempts(SOON, self._deadline_s), {"clientName": holder, "last": last}
        while not self.call("complete", CallWait.LONG, src=path, **fields).result:
            _wait_for_reports(attempts, TimeoutError("the NameNode does not know the last block"))

    def plain_block_bytes(self, path: str) -> int:
        """Return the block size of a file; 0 if the file is encrypted or erasure-coded."""
        status = self.call("getFileInfo", CallWait.LONG, src=path).fs
        return int(status.blocksize) if _is_plain(status) else 0

    def call(self, method: str, wait: CallWait = CallWait.SHORT, **fields: Any) -> Message:
        """Call a method of ClientProtocol with the given request fields; return its response."""
        name = method[0].upper() + method[1:]
        request = MESSAGES[f"{name}Request"](**fields)
        return parse(f"{name}Response", self.answer(method, request.SerializeToString(), wait))

    def answer(self, method: str, request: bytes, wait: CallWait) -> bytes:
        """Return the response to a serialized request."""
        config = self._config_if_open(wait)
        if config is None:
            raise NoCallsError("the NameNode takes no calls from us")
        return self._answer(config, method, request, wait)

    def _answer(self, config: _ClusterConfig, method: str, request: bytes, wait: CallWait) -> bytes:
        began_s = time.monotonic()
        try:
            answer = self._ask(config, method, request, wait)
        except RpcError:
            WAIT_BUDGET.answered()
            raise
        except (DeadlineError, UnavailableError):
            if wait is not CallWait.CHECK:  # the hdfs-native call that waits for it counts the time
                WAIT_BUDGET.spend(time.monotonic() - began_s)
            raise
        WAIT_BUDGET.answered()
        return answer

    def _ask(self, config: _ClusterConfig, method: str, request: bytes, wait: CallWait) -> bytes:
        client, count = os.urandom(16), len(config.addresses)
        # One of several NameNodes will be active soon; a single one that refuses stays as it is.
        deadline_s, policy = self._deadline_s, UNTIL_DEADLINE if count > 1 else REQUEST
        if wait is CallWait.CHECK:
            deadline_s, policy = min(_CHECK_S, deadline_s / 2), ONCE
        elif wait is CallWait.SHORT:
            deadline_s = min(_SHORT_S, deadline_s)
        elif wait is CallWait.LONG:
            deadline_s, policy = OUTAGE_DEADLINES * deadline_s, UNTIL_DEADLINE
        deadline_s = min(deadline_s, WAIT_BUDGET.left_s)
        if deadline_s <= 0:
            raise WAIT_BUDGET.error()
        attempts = Attempts(policy, deadline_s)
        end_s = time.monotonic() + deadline_s
        while True:
            first, retry_count = self._first, attempts.failures_count
            is_last = retry_count + 1 == policy.attempts
            sent = _frames_of(config.user, client, retry_count, method, request)
            for turn in range(count):
                # A silent NameNode (dead or hung) must leave time for the others, and for another
                # round, since for a while none may be active.
                left_count = 1 if count == 1 else (count - turn) * (1 if is_last else 2)
                now_s, index = time.monotonic(), (first + turn) % count
                until_s = now_s + max(0.0, end_s - now_s) / left_count
                connect_s = until_s - now_s if count == 1 else min(until_s - now_s, _CONNECT_S)
                try:
                    answer = _exchange(config.addresses[index], sent, connect_s, until_s)
                except RpcError as error:
                    is_standby = "StandbyException" in str(error)
                    if not is_standby:
                        self._first = index
                        if wait is not CallWait.LONG or not is_not_serving(error):
                            raise
                    cause: Exception = error
                except OSError as error:
                    cause = error
                else:
                    self._first = index
                    return answer
            pause_s = attempts.pause_s(UnavailableError(str(cause)))
            if is_last:
                raise UnavailableError(f"no NameNode answers: {cause}") from cause
            if pause_s is None:
                raise DeadlineError(f"no NameNode answered within {deadline_s:g} s: {cause}")
            time.sleep(pause_s)

    # ---- capacity -------------------------------------------------------------------------------

    def space(self, path: str) -> Space | None:
        """Return the capacity of the quota of the directory `path`, or else of the cluster.

        Return None if the NameNode does not answer. Sizes include replication, as HDFS counts. The
        answer is cached for `_SPACE_S`, so an instance must always be asked for the same `path`.
        """
        with self._lock:
            space, until_s = self._space
        if time.monotonic() < until_s:
            return space
        try:
            stats = self.call("getFsStats")
            space = Space(stats.capacity, stats.remaining)
            if time.monotonic() >= self._no_quota_until_s:
                usage = self.call("getQuotaUsage", path=path).usage
                if usage.spaceQuota >= _NO_QUOTA:
                    self._no_quota_until_s = time.monotonic() + _NO_QUOTA_S
                else:
                    left_bytes = max(0, usage.spaceQuota - usage.spaceConsumed)
                    space = Space(usage.spaceQuota, min(left_bytes, space.free_bytes))
        except UNANSWERED:
            pass  # keep the last answer, if any
        with self._lock:
            self._space = space, time.monotonic() + _SPACE_S
        return space

    def is_full(self, count: int, block_bytes: int | None) -> bool:
        """Return whether the cluster is full; False if the NameNode does not answer.

        The cluster is full if some DataNode is alive, and its `count` DataNodes have no room for
        more blocks of `block_bytes` (None: the cluster's default block size).
        """
        try:
            stats = self.call("getFsStats")
            if not block_bytes:
                block_bytes = self.call("getServerDefaults").serverDefaults.blockSize
        except UNANSWERED:
            return False
        return bool(stats.capacity > 0 and stats.remaining < count * _ROOM_BLOCKS * block_bytes)


# ---- one call to one NameNode --------------------------------------------------------------------


def _frames_of(user: str, client: bytes, retry_count: int, method: str, request: bytes) -> bytes:
    """Return the bytes to send for a call.

    A NameNode executes a call that a `client` id repeats only once.
    """
    context = encoded("IpcConnectionContext", userInfo={"effectiveUser": user}, protocol=PROTOCOL)
    header = encoded(
        "RequestHeader",
        methodName=method,
        declaringClassProtocolName=PROTOCOL,
        clientProtocolVersion=1,
    )
    return (
        RPC_BEGIN
        + _frame(_CONTEXT_CALL_ID, client, -1, context)
        + _frame(0, client, retry_count, header + delimited(request))
    )


def _exchange(address: Address, sent: bytes, connect_s: float, end_s: float) -> bytes:
    count_request(NAMENODE)
    host, port = address
    # For a `str` name the resolver would load Unicode tables first, which takes 5 ms of a start.
    where: Any = (host.encode() if host.isascii() else host, port)
    with socket.create_connection(where, max(0.1, connect_s)) as connection:
        connection.sendall(sent)
        # The deadline applies to the whole answer, not to each of its bytes.
        (length,) = struct.unpack(">I", _receive(connection, 4, end_s))
        if length > _FRAME_MAX_BYTES:
            raise NotHadoopError(f"{host}:{port} does not speak Hadoop's RPC")
        return response_in(_receive(connection, length, end_s))


def _wait_for_reports(attempts: Attempts, error: Exception) -> None:
    """Wait a moment for DataNodes to report blocks; raise `error` after the last attempt."""
    pause_s = attempts.pause_s(TimeoutError(str(error)))
    if pause_s is None:
        raise error
    time.sleep(pause_s)


def _text(value: str | bytes) -> str:
    """Return a string field. Raises: ValueError for bytes, protobuf's form of invalid UTF-8."""
    if isinstance(value, bytes):
        raise ValueError("a name that is not UTF-8")
    return value


def _is_plain(message: Message) -> bool:
    return not message.HasField("fileEncryptionInfo") and not message.HasField("ecPolicy")


def _frame(call_id: int, client: bytes, retry: int, body: bytes) -> bytes:
    header = encoded(
        "RpcRequestHeader",
        rpcKind=_PROTOCOL_BUFFERS,
        rpcOp=_ORDINARY_CALL,
        callId=call_id,
        clientId=client,
        retryCount=retry,
    )
    return struct.pack(">I", len(header) + len(body)) + header + body


def _receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    """Return the next `count` bytes, by the monotonic time `end_s`. Raises: OSError."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        left_s = end_s - time.monotonic()
        # A byte now and then does not extend the deadline of the answer.
        if left_s <= 0 and len(rest) < count:
            raise TimeoutError("the NameNode's answer does not end")
        connection.settimeout(max(0.01, left_s))
        received = connection.recv_into(rest)
        if not received:
            raise ConnectionError("the NameNode closed the connection")
        rest = rest[received:]
    return bytes(data)


def response_in(frame: bytes) -> bytes:
    """Return the response in the frame of an answer.

    Raises: RpcError for an exception of the NameNode; ConnectionError for a malformed frame.
    """
    try:
        head, end = take_delimited(frame, _FRAME_MAX_BYTES)
        if head is None:
            raise ValueError("no header")
        header = parse("RpcResponseHeader", head)
        if header.status == SUCCESS:
            response, _ = take_delimited(frame[end:], _FRAME_MAX_BYTES)
            if response is None:
                raise ValueError("no response")
            return response
    except ValueError as error:
        raise ConnectionError("the NameNode's answer cannot be understood") from error
    texts = (header.exceptionClassName, header.errorMsg)
    raise RpcError(
        ": ".join(text[:_TEXT_MAX_BYTES].decode("utf-8", "replace") for text in texts if text)
    )


# ---- configuration -------------------------------------------------------------------------------


def _user() -> str:
    import getpass  # here, since it imports terminal modules

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a pod, a user often has no name.
        return str(os.geteuid())


def _cluster_config(cluster: str) -> _ClusterConfig:
    config, parts = _hadoop_configuration(), urlsplit(cluster)
    host = parts.hostname or ""
    listed = config.get(_NAMES + host, "") if parts.port is None else ""
    known = {
        name.strip(): config.get(f"{_ADDRESS}{host}.{name.strip()}") for name in listed.split(",")
    }
    addresses = tuple(_address(text) for text in known.values() if text)
    return _ClusterConfig(
        addresses or ((host, parts.port or _DEFAULT_PORT),),
        tuple(name for name, text in known.items() if text),
        os.environ.get("HADOOP_USER_NAME") or _user(),
        config.get("hadoop.security.authentication", "simple") != "simple",
        config.get("dfs.client.use.datanode.hostname") == "true",
    )


def _address(text: str) -> Address:
    host, _, port = text.strip().rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (text, _DEFAULT_PORT)


def _hadoop_configuration() -> dict[str, str]:
    """Return the Hadoop configuration of this machine, from the files that hdfs-native reads."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    if folder is None and (home := os.environ.get("HADOOP_HOME")):
        folder = f"{home}/etc/hadoop"
    values: dict[str, str] = {}
    if not folder:
        return values
    # Imported here: few machines have a configuration, and every start of a job loads this module.
    import xml.etree.ElementTree as ET

    for name in _CONFIG_FILES:
        try:
            root = ET.parse(Path(folder) / name).getroot()
        except (OSError, ET.ParseError):
            continue
        for entry in root.iter("property"):
            key, value = entry.findtext("name"), entry.findtext("value")
            if key and value:
                values[key.strip()] = value.strip()
    return values


def _connection_errors(addresses: Sequence[Address], timeout_s: float) -> dict[Address, OSError]:
    """Return the connection error of each address; empty if one of them takes a connection."""
    failures = {}
    for address in addresses:
        try:
            socket.create_connection(address, max(0.1, timeout_s)).close()
        except OSError as error:
            failures[address] = error
        else:
            return {}
    return failures


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer to a connection"
    return error.strerror or str(error)
