"""NameNodes of one HDFS cluster: calls that hdfs-native lacks, and which NameNode is active.

hdfs-native 0.14.7 does not tell where blocks lie or how much room there is, cannot choose
DataNodes, and has no `concat`. These calls are made by Hadoop's RPC, version 9, with simple
authentication, one call per connection. A call whose connection broke is repeated under the same
identity, and the NameNode's retry cache makes it happen once. `NameNodes` finds out, once per
cluster, whether such calls are taken at all (where Kerberos is wanted they are not, and hdfs-native
is alone with the cluster), says why none can be reached, and tells a full cluster from a dead one.

Any thread. Every wait ends by a deadline; an answer is bounded as a whole, in time and in size.
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

from bootseer.base.patience import PATIENCE
from bootseer.base.redact import public_url
from bootseer.base.requests import NAMENODE, count_request
from bootseer.base.varints import delimited, take_delimited
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.store.backend import Space
from bootseer.store.deadline import begin_in_children
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
# Of an exception: its class, and a message with a stack trace.
_TEXT_MAX_BYTES = 64 << 10
_PROTOCOL_BUFFERS, _ORDINARY_CALL, _CONTEXT_CALL_ID = 2, 0, -3
# The deadline of a connection where other NameNodes are left: TCP asks three times meanwhile.
_CONNECT_S = 5.0

# More than a part has. Blocks are of a megabyte or more, so that the NameNode's answer stays below
# the megabyte that is taken from it.
_LOCATED_BYTES = 1000 << 20
# Of blocks as most clusters have them a thousand are so much.
_LARGE_BLOCK_BYTES = 64 << 20

_DEFAULT_PORT = 8020
_HURRIED_S = 5.0
_CHECK_S = 2.0
# A NameNode that did not answer is asked again by the first who needs it after this time.
SILENT_S = 60.0
# For a NameNode that is being restarted, or a resolver; what lasts longer is a wrong address.
_REACH_S = 10.0
_REACH_CONNECT_S = 3.0
_REFUSAL = "SIMPLE authentication is not enabled"
_NAMES, _ADDRESS = "dfs.ha.namenodes.", "dfs.namenode.rpc-address."
_CONFIG_FILES = ("core-site.xml", "hdfs-site.xml")

_SPACE_S = 10.0
# "No quota" is -1, in 64 bits. To say so, the NameNode walks through the directory.
_NO_QUOTA = 2**63
_NO_QUOTA_S = 3600.0
# The NameNode offers a DataNode only if it has room for a block besides those that are being
# written to it, which it counts as if they were full, and those that failed minutes ago: so many.
_ROOM_BLOCKS = 16

# A NameNode that was just started, or is about to become active, has done nothing of what it was
# asked, and will do it a little later.
_NOT_SERVING = ("SafeModeException", "RetriableException", "StandbyException")
OUT_OF_ROOM = "Resources are low on NN"
"""The NameNode has put itself into safe mode."""
TOO_FEW_DATANODES = "could only be written to"
"""Too few were found for a block: the others are excluded, full, dead or too busy."""
RPC_TEXT = re.compile(r'RPCError\("[\w.$]*?([\w$]+)", "(.*)', re.DOTALL)
"""How hdfs-native shows an exception of a NameNode: its class, and its message."""

Address = tuple[str, int]


class NoCallsError(OSError):
    """No NameNode is known that takes calls from us: Kerberos is wanted, or none has answered."""


class RpcError(Exception):
    """The NameNode's answer is an exception; the text begins with its Java class."""


class NotHadoopError(ConnectionError):
    """The answer is no frame of Hadoop's RPC: another server has this port."""


UNANSWERED = (RpcError, OSError, ValueError)
"""What a call may end with, also where the answer is nonsense: for whom it was only a question."""


def is_not_serving(error: BaseException | None) -> bool:
    """Tell whether `error`, of hdfs-native or of a call here, says that a NameNode did nothing and
    should be asked again: it is in safe mode, starts, or is not the active one."""
    text = str(error)
    if OUT_OF_ROOM in text:
        return False
    # Of a RetriableException, the class that it wraps comes in the message.
    match = RPC_TEXT.match(text)
    raised = match[1] if match else text.partition(":")[0]
    return any(name in raised for name in _NOT_SERVING)


class Replica(Struct, frozen=True):
    """A DataNode that has a block."""

    address: Address
    is_far: bool = False
    """Whether another one is nearer to us, by what the NameNode says."""


class StoredBlock(Struct, frozen=True):
    """A block of a file, and who has it."""

    start: int
    """The block's offset in the file."""
    block: Message
    """ExtendedBlock."""
    token: bytes
    """What a DataNode wants to see where blocks are guarded."""
    replicas: tuple[Replica, ...]
    """The nearest one first."""

    @property
    def length(self) -> int:
        """Number of bytes of the file in the block."""
        length: int = self.block.numBytes
        return length


class AddedBlock(Struct, frozen=True):
    """A block that was allocated, and is still empty."""

    located: Message
    """LocatedBlock."""
    address: Address
    """The address of the first DataNode."""
    servers: dict[str, Message]
    """The DataNodes (DatanodeInfo) by UUID, in the order in which they pass on what is written."""

    def block_of(self, size_bytes: int) -> Message:
        """Return the block with so much in it."""
        block = MESSAGES["ExtendedBlock"]()
        block.CopyFrom(self.located.b)
        block.numBytes = size_bytes
        return block


# ---- NameNodes -----------------------------------------------------------------------------------


class _Site(Struct, frozen=True):
    """NameNodes of a cluster, from its URL and the Hadoop configuration of this machine."""

    addresses: tuple[Address, ...]
    names: tuple[str, ...]
    """The names of the NameNodes of a nameservice; empty for `hdfs://HOST:PORT`."""
    user: str
    is_secure: bool
    calls_by_name: bool
    """Whether DataNodes are called by their names, not their addresses."""


class _State(Enum):
    """Whether NameNodes take calls from us."""

    UNKNOWN = auto()
    """Nobody was asked, or nobody answered."""
    OPEN = auto()
    CLOSED = auto()
    """The configuration says Kerberos, or the calls are refused for another reason."""
    UNCONFIGURED = auto()
    """Kerberos is wanted, and no configuration says so."""


class Haste(Enum):
    """Patience of a call with NameNodes that do not answer."""

    CHECK = auto()
    """One attempt of two seconds at most."""
    HURRIED = auto()
    """Five seconds: the answer is worth no long wait."""
    USUAL = auto()
    """The deadline."""
    PATIENT = auto()
    """More than a deadline, also for a NameNode that is not ready yet: a write is lost with it."""


class NameNodes:
    """The NameNodes of one cluster, found when they are first needed. Any thread.

    Every call raises one of UNANSWERED: NoCallsError where calls are not taken from us, RpcError,
    UnavailableError or DeadlineError; ValueError for an answer that makes no sense. Paths are
    absolute.
    """

    def __init__(self, cluster: str, deadline_s: float) -> None:
        """Remember the cluster (`hdfs://HOST:PORT` or `hdfs://NAMESERVICE`); ask nobody."""
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._state = _State.UNKNOWN
        self._silent_until_s = 0.0
        self._site: _Site | None = None
        """In the state OPEN."""
        self._first = 0
        """The number of the NameNode that answered last, and is asked first."""
        self._space: tuple[Space | None, float] = None, 0.0
        self._no_quota_until_s = 0.0
        self.begin()
        begin_in_children(self)

    def begin(self) -> None:
        """Start with a new lock, as a forked child has to; what is known stays known."""
        self._lock = threading.Lock()
        """Also held while the NameNodes are asked for the first time."""

    # ---- whether calls are taken ----------------------------------------------------------------

    def check(self) -> bool:
        """Raise what hdfs-native would retry until a deadline, without a word about the reason.

        Returns: whether the configuration says Kerberos.
        Raises: UnavailableError: no server takes connections where the NameNode should be, or it is
        something else; PermissionDeniedError: the NameNode wants Kerberos, and no configuration
        says so.
        """
        with self._lock:
            site = _site(self._cluster)
            if self._state is _State.UNKNOWN:
                if site.is_secure:
                    self._await_reachable(site)
                if error := self._find(site, Haste.CHECK):
                    self._await_reachable(site)
                    self._say_why(error)
            if self._state is _State.UNCONFIGURED:
                raise PermissionDeniedError(
                    f"{self._cluster} wants Kerberos: let HADOOP_CONF_DIR name the folder of its "
                    "core-site.xml and hdfs-site.xml"
                )
            return site.is_secure

    def take_calls(self) -> bool:
        """Tell whether the active NameNode takes calls from us: not where Kerberos is wanted."""
        return self._found(Haste.USUAL) is not None

    def _found(self, haste: Haste) -> _Site | None:
        with self._lock:
            is_due = haste is Haste.PATIENT or time.monotonic() >= self._silent_until_s
            if self._state is _State.UNKNOWN and is_due and self._find(_site(self._cluster), haste):
                self._silent_until_s = time.monotonic() + SILENT_S
            return self._site

    def _find(self, site: _Site, haste: Haste) -> BootseerError | None:
        """Find out whether calls are taken; returns why that remains unknown."""
        if site.is_secure:
            self._state = _State.CLOSED
            return None
        request = MESSAGES["GetFileInfoRequest"](src="/").SerializeToString()
        try:
            self._answer(site, "getFileInfo", request, haste)
        except RpcError as error:
            is_kerberos = _REFUSAL in str(error)
            self._state = _State.UNCONFIGURED if is_kerberos else _State.CLOSED
        except BootseerError as error:
            return error
        else:
            self._state, self._site = _State.OPEN, site
        return None

    def _await_reachable(self, site: _Site) -> None:
        """Wait until a NameNode takes a connection, and log that (hdfs-native tries for a minute,
        in silence). Raises: UnavailableError with the reason of each."""
        limit_s = min(self._deadline_s, _REACH_S)
        attempts = Attempts(UNTIL_DEADLINE, limit_s)
        hint = f"check the URL {public_url(self._cluster)}"
        if urlsplit(self._cluster).port is None and not site.names:
            hint += (
                ", or, for a nameservice, that HADOOP_CONF_DIR names the folder of hdfs-site.xml"
            )
        while failures := _refusals(site.addresses, min(_REACH_CONNECT_S, attempts.left_s)):
            reasons = ", ".join(
                f"{host}:{port}: {_reason(error)}" for (host, port), error in failures.items()
            )
            is_unknown = all(
                isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
                for error in failures.values()
            )
            error = UnavailableError(f"no NameNode can be reached ({reasons}); {hint}")
            pause_s = None if is_unknown else attempts.pause_s(error)
            if pause_s is None:
                raise error
            if attempts.failures_count == 1:
                _log.warning("waiting up to %g s for a NameNode (%s)", limit_s, reasons)
            time.sleep(pause_s)

    def _say_why(self, error: BootseerError) -> None:
        """Explain a NameNode that takes connections, and does not answer."""
        cluster = public_url(self._cluster)
        if isinstance(error.__cause__, NotHadoopError):
            raise UnavailableError(
                f"{error}; check the port of {cluster}: the NameNode's RPC has mostly 8020, its "
                "web pages have another one"
            ) from error
        _log.warning("waiting up to %g s for %s: %s", self._deadline_s, cluster, error)

    def refusal(self) -> OSError | None:
        """Return why none of the NameNodes takes a connection now; None: one of them does.

        hdfs-native goes on trying to connect, so that a NameNode that is down looks to its caller
        like one that hangs.
        """
        failures = list(_refusals(_site(self._cluster).addresses, _CHECK_S).values())
        return failures[-1] if failures else None

    def order(self) -> dict[str, str]:
        """Return the entry of the configuration that puts the active NameNode first; empty where
        only one, or none, is known. hdfs-native waits for ever for one that is silent."""
        with self._lock:
            if self._site is None or len(self._site.names) < 2:
                return {}
            names = self._site.names[self._first :] + self._site.names[: self._first]
            return {_NAMES + (urlsplit(self._cluster).hostname or ""): ",".join(names)}

    def has_left(self, order: dict[str, str]) -> bool:
        """Tell whether another one is active now than when `order` was returned."""
        if not order:
            return False
        try:
            self.call("getFileInfo", src="/")
        except UNANSWERED:
            return False
        return self.order() != order

    # ---- calls ----------------------------------------------------------------------------------

    def concat(self, target: str, sources: Sequence[str]) -> None:
        """Append the files `sources` to `target`; they vanish."""
        self.call("concat", Haste.PATIENT, trg=target, srcs=sources)

    def writing_servers(self, path: str) -> tuple[str, ...]:
        """Return the UUIDs of the DataNodes of the block that is being written at the end of
        `path`."""
        found = self._located(path, 1)
        blocks = [found.lastBlock] if found.HasField("lastBlock") else found.blocks[-1:]
        return tuple(_text(server.id.datanodeUuid) for block in blocks for server in block.locs)

    def is_being_written(self, path: str) -> bool:
        """Tell whether a client has a file open for writing. RpcError with a FileNotFoundException
        where there is none."""
        return bool(self._located(path, 1, Haste.USUAL).underConstruction)

    def stored_blocks(self, path: str) -> tuple[StoredBlock, ...]:
        """Return the first blocks of a file in order, some thousand; none where a block is no plain
        run of its bytes (encrypted, erasure-coded) or is being written."""
        found = self._located(path, _LOCATED_BYTES)
        if found.underConstruction or not _is_plain(found):
            return ()
        if found.blocks and found.blocks[0].b.numBytes >= _LARGE_BLOCK_BYTES:
            last = found.blocks[-1]
            if last.offset + last.b.numBytes >= _LOCATED_BYTES:
                found = self._located(path, 1000 * _LARGE_BLOCK_BYTES)
        return tuple(
            StoredBlock(one.offset, one.b, one.blockToken, self._replicas(one))
            for one in found.blocks
        )

    def _located(self, path: str, end: int, haste: Haste = Haste.HURRIED) -> Message:
        return self.call("getBlockLocations", haste, src=path, offset=0, length=end).locations

    def _replicas(self, block: Message) -> tuple[Replica, ...]:
        servers: Sequence[Message] = () if block.corrupt else block.locs
        return tuple(
            Replica(self._address(server), server.location != servers[0].location)
            for server in servers
        )

    def _address(self, server: Message) -> Address:
        by_name = self._site is not None and self._site.calls_by_name
        host = server.id.hostName if by_name else server.id.ipAddr
        return _text(host), server.id.xferPort

    def add_block(
        self, path: str, holder: str, excluded: Sequence[Message] = (), previous: Message = None
    ) -> AddedBlock:
        """Allocate a block of a file that `holder` is writing, not on the DataNodes `excluded`: the
        first one, or, once the DataNodes have reported it, that after `previous`."""
        haste = Haste.HURRIED if previous is None else Haste.PATIENT
        attempts = Attempts(SOON, self._deadline_s)
        fields = {"src": path, "clientName": holder, "previous": previous, "excludeNodes": excluded}
        while True:
            try:
                located = self.call("addBlock", haste, **fields).block
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
        """Give back what `add_block` returned."""
        self.call("abandonBlock", b=block, src=path, holder=holder)

    def complete(self, path: str, holder: str, last: Message) -> None:
        """Close a file with its `last` block, once the DataNodes have reported all blocks."""
        attempts, fields = Attempts(SOON, self._deadline_s), {"clientName": holder, "last": last}
        while not self.call("complete", Haste.PATIENT, src=path, **fields).result:
            _wait_for_reports(attempts, TimeoutError("the NameNode does not know the last block"))

    def plain_block_bytes(self, path: str) -> int:
        """Return how large the blocks of a file are at most; 0 where their bytes are not the file's
        (encrypted, erasure-coded)."""
        status = self.call("getFileInfo", Haste.PATIENT, src=path).fs
        return int(status.blocksize) if _is_plain(status) else 0

    def call(self, method: str, haste: Haste = Haste.HURRIED, **fields: Any) -> Message:
        """Call a method of ClientProtocol with the fields of its request; returns its response."""
        name = method[0].upper() + method[1:]
        request = MESSAGES[f"{name}Request"](**fields)
        return parse(f"{name}Response", self.answer(method, request.SerializeToString(), haste))

    def answer(self, method: str, request: bytes, haste: Haste) -> bytes:
        """Return the response to a serialized request."""
        site = self._found(haste)
        if site is None:
            raise NoCallsError("the NameNode takes no calls from us")
        return self._answer(site, method, request, haste)

    def _answer(self, site: _Site, method: str, request: bytes, haste: Haste) -> bytes:
        began_s = time.monotonic()
        try:
            return self._asked(site, method, request, haste)
        except (DeadlineError, UnavailableError):
            if haste is not Haste.CHECK:  # which hdfs-native's call is waiting for
                PATIENCE.spend(time.monotonic() - began_s)
            raise

    def _asked(self, site: _Site, method: str, request: bytes, haste: Haste) -> bytes:
        client, count = os.urandom(16), len(site.addresses)
        # Of several one is active sooner or later; a single one that refuses goes on doing so.
        deadline_s, policy = self._deadline_s, UNTIL_DEADLINE if count > 1 else REQUEST
        if haste is Haste.CHECK:
            deadline_s, policy = min(_CHECK_S, deadline_s / 2), ONCE
        elif haste is Haste.HURRIED:
            deadline_s = min(_HURRIED_S, deadline_s)
        elif haste is Haste.PATIENT:
            deadline_s, policy = OUTAGE_DEADLINES * deadline_s, UNTIL_DEADLINE
        deadline_s = min(deadline_s, PATIENCE.left_s)
        if deadline_s <= 0:
            raise DeadlineError(f"no answer within {PATIENCE.limit_s:g} s, in earlier calls")
        attempts = Attempts(policy, deadline_s)
        end_s = time.monotonic() + deadline_s
        while True:
            first, retry_count = self._first, attempts.failures_count
            is_last = retry_count + 1 == policy.attempts
            sent = _frames_of(site.user, client, retry_count, method, request)
            for turn in range(count):
                # One that is silent (its host is dead, or it hangs) leaves time for the others, and
                # for another round: none may be active for a while.
                left_count = 1 if count == 1 else (count - turn) * (1 if is_last else 2)
                now_s, index = time.monotonic(), (first + turn) % count
                until_s = now_s + max(0.0, end_s - now_s) / left_count
                connect_s = until_s - now_s if count == 1 else min(until_s - now_s, _CONNECT_S)
                try:
                    answer = _exchange(site.addresses[index], sent, connect_s, until_s)
                except RpcError as error:
                    is_standby = "StandbyException" in str(error)
                    if not is_standby:
                        self._first = index
                        if haste is not Haste.PATIENT or not is_not_serving(error):
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

    # ---- room -----------------------------------------------------------------------------------

    def space(self, path: str) -> Space | None:
        """Return the room that the quota of the directory `path` leaves, or else that of the
        cluster; None where it does not say. For one `path` only.

        Both with replication, as HDFS counts. An answer is good for a while.
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
            pass  # the last answer, or none
        with self._lock:
            self._space = space, time.monotonic() + _SPACE_S
        return space

    def is_full(self, count: int, block_bytes: int | None) -> bool:
        """Tell whether some DataNode lives and the `count` DataNodes that there are, or were a
        moment ago, have hardly any room; False where the NameNode does not say.

        `block_bytes`: of the file that cannot be written; None: as the cluster likes.
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
    """Return the bytes that are sent for a call. A call that a `client` repeats under the same
    identity is not made again."""
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
    # Of a name that is text the resolver loads Unicode's tables first, 5 ms of a start.
    where: Any = (host.encode() if host.isascii() else host, port)
    with socket.create_connection(where, max(0.1, connect_s)) as connection:
        connection.sendall(sent)
        # The whole answer has one deadline, not each of its bytes.
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
    """Return a string field; protobuf gives those that are not UTF-8 as bytes."""
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
        # Also where a byte comes now and then: an answer has one deadline.
        if left_s <= 0 and len(rest) < count:
            raise TimeoutError("the NameNode's answer does not end")
        connection.settimeout(max(0.01, left_s))
        received = connection.recv_into(rest)
        if not received:
            raise ConnectionError("the NameNode closed the connection")
        rest = rest[received:]
    return bytes(data)


def response_in(frame: bytes) -> bytes:
    """Return the response that an answer's frame holds. Raises: RpcError, as the NameNode raised
    it; ConnectionError where the frame cannot be understood."""
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
    import getpass  # Loads terminals' code.

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a pod, a user often has a number only.
        return str(os.geteuid())


def _site(cluster: str) -> _Site:
    config, parts = _configuration(), urlsplit(cluster)
    host = parts.hostname or ""
    listed = config.get(_NAMES + host, "") if parts.port is None else ""
    known = {
        name.strip(): config.get(f"{_ADDRESS}{host}.{name.strip()}") for name in listed.split(",")
    }
    addresses = tuple(_address(text) for text in known.values() if text)
    return _Site(
        addresses or ((host, parts.port or _DEFAULT_PORT),),
        tuple(name for name, text in known.items() if text),
        os.environ.get("HADOOP_USER_NAME") or _user(),
        config.get("hadoop.security.authentication", "simple") != "simple",
        config.get("dfs.client.use.datanode.hostname") == "true",
    )


def _address(text: str) -> Address:
    host, _, port = text.strip().rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (text, _DEFAULT_PORT)


def _configuration() -> dict[str, str]:
    """Return the site's Hadoop configuration, from where hdfs-native reads it too."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    if folder is None and (home := os.environ.get("HADOOP_HOME")):
        folder = f"{home}/etc/hadoop"
    values: dict[str, str] = {}
    if not folder:
        return values
    # Here, since most have none, and every start of a job loads this module.
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


def _refusals(addresses: Sequence[Address], timeout_s: float) -> dict[Address, OSError]:
    """Return why each of the addresses takes no connection; empty as soon as one does."""
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
