"""Journal of a mount's server: the nodes and open files that a successor process must know.

The file `journal` in the server's folder is a sequence of records: a length (four bytes) and a
tagged struct in MessagePack. A record is written before the kernel gets the reply that it is about.
If the process is killed, no record is lost, because the kernel keeps written pages; a record that
is cut short at the end has no reply. Layouts and pinned contents of open files are recorded as
well, because the files' names may belong to other generations later.

Not thread-safe: the file system holds its lock around every call.
"""

import contextlib
import enum
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct, field

from bootseer.errors import CorruptError
from bootseer.fuse.striped.layout import decode_layout, encode_layout
from bootseer.fuse.striped.view import FileView
from bootseer.linux.private_files import is_own, private_opener

_log = logging.getLogger(__name__)

VERSION = 1
# The journal is rewritten when it has this many times its size after the last rewrite.
_SMALL_BYTES = 4 * 2**20
_GROWTH = 4
# After a failed write, the journal is begun anew no sooner than this.
RETRY_S = 10.0
_NEW = ".journal-new"
_LENGTH_BYTES = 4


class NodeKind(enum.IntEnum):
    """Kind of a node (see `nodes`)."""

    STORED = 0
    """Node of a stored file or directory, which lookups find."""
    LOCAL = 1
    """Node that lookups find, of a file that was created here and is not published yet."""
    WRITER = 2
    """Node of a descriptor that writes, which no lookup finds."""


class ViewRecord(Struct, frozen=True, array_like=True):
    """A `FileView` without its layout. Names are bytes: not all of them are UTF-8."""

    path: bytes
    identity: bytes
    size_bytes: int
    modified_ns: int
    is_striped: bool


class BeginRecord(Struct, frozen=True, array_like=True, tag=0):
    """The first record."""

    version: int


class NodeRecord(Struct, frozen=True, array_like=True, tag=1):
    """State of a new or changed node."""

    node: int
    parent: int | None
    name: bytes
    is_dir: bool
    size_bytes: int
    modified_ns: int
    identity: bytes
    kind: NodeKind
    inode: int
    is_forgotten: bool


class NodeGoneRecord(Struct, frozen=True, array_like=True, tag=2):
    """End of a node: the kernel has forgotten it."""

    node: int


class FileRecord(Struct, frozen=True, array_like=True, tag=3):
    """State of a newly opened or changed open file."""

    file: int
    node: int
    flags: int
    request: int
    reads: ViewRecord | None
    is_pinned: bool
    base: ViewRecord | None
    writer_path: bytes | None
    """Path under which the writer publishes; None if the file has no writer. The path of the node
    may differ: a node that lost its name may belong to a writer that still has the name."""
    is_nameless: bool
    is_unfinished: bool
    killed: bool
    superseded: bool


class FileClosedRecord(Struct, frozen=True, array_like=True, tag=4):
    """End of an open file."""

    file: int


class PendingLookupRecord(Struct, frozen=True, array_like=True, tag=5):
    """Pending lookup of a thread (see `nodes`). Without a node, the pending lookup has ended."""

    thread: int
    name: bytes
    node: int | None
    writer_node: int | None
    only_reads: bool


class LayoutRecord(Struct, frozen=True, array_like=True, tag=6):
    """The layout of an open file, encoded as in the storage."""

    identity: bytes
    data: bytes


class PinnedRecord(Struct, frozen=True, array_like=True, tag=7):
    """The content of an open file whose stored file is gone."""

    identity: bytes
    content: bytes


Record: TypeAlias = (
    BeginRecord
    | NodeRecord
    | NodeGoneRecord
    | FileRecord
    | FileClosedRecord
    | PendingLookupRecord
    | LayoutRecord
    | PinnedRecord
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Inherited(Struct):
    """Contents of a journal: the last state of each node, open file and pending lookup."""

    nodes: dict[int, NodeRecord] = field(default_factory=dict)
    files: dict[int, FileRecord] = field(default_factory=dict)
    pending: dict[tuple[int, bytes], PendingLookupRecord] = field(default_factory=dict)
    layouts: dict[bytes, bytes] = field(default_factory=dict)
    pinned: dict[bytes, bytes] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Apply the next record."""
        match record:
            case NodeRecord():
                self.nodes[record.node] = record
            case NodeGoneRecord():
                self.nodes.pop(record.node, None)
            case FileRecord():
                self.files[record.file] = record
            case FileClosedRecord():
                self.files.pop(record.file, None)
            case PendingLookupRecord():
                self.pending[record.thread, record.name] = record
            case LayoutRecord():
                self.layouts[record.identity] = record.data
            case PinnedRecord():
                self.pinned[record.identity] = record.content
            case BeginRecord():
                pass

    def check(self) -> None:
        """Raise CorruptError if a record that an open file needs is missing or damaged."""
        try:
            for record in self.files.values():
                self.view(record.base)
                self.view(record.reads)
                if record.is_pinned and record.reads is not None:
                    self.pinned[record.reads.identity]
        except KeyError as error:
            raise CorruptError(
                f"the journal has no layout or content of the open file {error}"
            ) from None

    def view(self, record: ViewRecord | None) -> FileView | None:
        """Return the view in a record. Raises: CorruptError, KeyError."""
        if record is None:
            return None
        path = os.fsdecode(record.path)
        layout = None
        if record.is_striped:
            layout = decode_layout(self.layouts[record.identity], path)
        identity = os.fsdecode(record.identity)
        return FileView(path, identity, record.size_bytes, record.modified_ns, layout)


def view_record(view: FileView | None) -> ViewRecord | None:
    """Return the record of a view. Its layout has a record of its own (`Journal.add_layout`)."""
    if view is None:
        return None
    return ViewRecord(
        os.fsencode(view.path),
        os.fsencode(view.identity),
        view.size_bytes,
        view.modified_ns,
        view.layout is not None,
    )


class Journal:
    """Open journal.

    After a failed write the mount still works, but a successor could not take over, until the
    journal can be begun anew (`is_outgrown`).
    """

    def __init__(self, path: Path, *, retry_s: float = RETRY_S) -> None:
        self._path = path
        self._retry_s = retry_s
        self._fd = -1
        self._bytes = 0
        self._fresh_bytes: int | None = None
        """Size after the last rewrite; None during a rewrite."""
        self._layouts: set[str] = set()
        self._failed_s: float | None = None
        """Monotonic time of a failed write."""

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Replace the journal by the records that the block adds. Errors of the disk are logged."""
        temporary = self._path.with_suffix(_NEW)
        self.close()
        self._bytes = 0
        self._fresh_bytes = None
        self._layouts.clear()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(temporary, flags, 0o600)
        except OSError as error:
            self._give_up(error)
        self.add(BeginRecord(VERSION))
        yield
        self._fresh_bytes = self._bytes
        try:
            if self._fd >= 0:
                temporary.replace(self._path)
        except OSError as error:
            self._give_up(error)

    def add(self, record: Record) -> None:
        """Append a record. Never raises."""
        if self._fd < 0:
            return
        data = _encode(record)
        rest = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        self._bytes += len(rest)
        try:
            # A disk that is nearly full takes only a part.
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._give_up(error)

    def add_layout(self, view: FileView | None) -> None:
        """Record the layout of `view`, unless it is recorded."""
        if self._fd < 0 or view is None or view.layout is None or view.identity in self._layouts:
            return
        self._layouts.add(view.identity)
        self.add(LayoutRecord(os.fsencode(view.identity), encode_layout(view.layout)))

    def add_pinned(self, view: FileView, content: bytes) -> None:
        """Record the content of an open file that is about to be removed."""
        self.add(PinnedRecord(os.fsencode(view.identity), content))

    @property
    def is_outgrown(self) -> bool:
        """Return whether the journal should be rewritten with the current state."""
        if self._fresh_bytes is None:
            return False
        if self._failed_s is not None:
            return time.monotonic() - self._failed_s >= self._retry_s
        if self._fd < 0:
            return False
        return self._bytes > max(_SMALL_BYTES, _GROWTH * self._fresh_bytes)

    def close(self) -> None:
        """Close the file; its records stay. Idempotent."""
        self._failed_s = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s: %s; a restarted server will not know what is open", self._path, error)
        self.close()
        self._failed_s = time.monotonic()
        # Incomplete records must not be read by a successor.
        for path in (self._path, self._path.with_suffix(_NEW)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read_journal(path: Path) -> Inherited:
    """Return the contents of a predecessor's journal; empty if there was none.

    Raises: OSError, CorruptError.
    """
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                raise CorruptError(f"{path} belongs to another user")
            data = memoryview(file.read())
    except FileNotFoundError:
        return Inherited()
    inherited = Inherited()
    begin: Record | None = None
    while len(data) > _LENGTH_BYTES:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        record, data = data[_LENGTH_BYTES:][:length], data[_LENGTH_BYTES + length :]
        if len(record) < length:
            break  # Cut short: the kernel got no reply.
        try:
            read = _decode(record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptError(f"{path} is damaged: {error}") from None
        begin = begin or read
        if begin != BeginRecord(VERSION):
            break
        inherited.take(read)
    if begin != BeginRecord(VERSION):
        raise CorruptError(f"{path} is of another version, or damaged")
    inherited.check()
    return inherited
