"""Key-value store on a backend, in which an object is visible only when it is complete.

docs/format/store.md is the specification. A key is a relative path such as "a/b/c" of at most 1024
bytes without "." and ".."; no key is a folder of another key. Thread-safe.
"""

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bootseer.base.closing import Closing
from bootseer.errors import BootseerError, DeadlineError, InvalidInputError, NotFoundError
from bootseer.store.backend import Backend, FileInfo, IsFolder, Reader
from bootseer.store.local.marked_folder import MARK, mark_store, remember
from bootseer.store.objects.lease import Lease, LeaseWatch, acquire
from bootseer.store.objects.publish import publish_object
from bootseer.store.paths import TEMPORARY, split_path
from bootseer.store.single_flight import SingleFlight
from bootseer.transfer.attempt import Attempt

logger = logging.getLogger(__name__)

KEY_MAX_BYTES = 1024
_DEPTH_MAX = 32
"""Most folders above an object: listings go no deeper into the folders of other programs."""
# Most images have fewer layers. An open reader takes a descriptor, or memory for HDFS block places.
_READERS_MAX = 64
_DAMAGED_MAX = 1024
_HIDDEN = (TEMPORARY, MARK)
# Age from which a temporary file is taken for one of a dead publisher. It far exceeds the skew
# between this node's clock and the storage's.
STALE_AFTER_S = 24 * 3600


class Store(Closing):
    """Objects under keys in one backend; closes the backend at the end of a `with` block."""

    def __init__(
        self,
        backend: Backend,
        *,
        memory: Path | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Take over `backend`; no request is sent.

        Args:
            backend: Storage of the objects, closed with the store.
            memory: Folder in which this node remembers the folders that it has used as stores.
            say: Function that gets a message if a folder becomes a new store.
        """
        self.backend = backend
        # Only folders have marks.
        self._folder = backend if isinstance(backend, IsFolder) else None
        self._memory = memory
        self._say = say
        self._is_marked = False
        self._is_remembered = False
        self._swept = False
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._opening = SingleFlight()
        self._damaged: set[str] = set()
        """Keys of objects whose reads have returned damaged bytes."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Root URL without credentials."""
        return self.backend.url

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes `[offset, offset + length)` of an object, fewer only at its end.

        Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        data = self.backend.read(check_key(key), offset, length)
        if self._folder is not None and not self._is_remembered:
            self._is_remembered = True
            root, memory = self._folder.root, self._memory
            with contextlib.suppress(DeadlineError):
                self._folder.within_deadline("look at", "", lambda: remember(root, memory))
        return data

    def read_into(
        self, key: str, offset: int, buffer: memoryview, attempt: Attempt | None = None
    ) -> int:
        """Fill `buffer` from `offset`; see `Reader.read_into`."""
        return self.backend.read_into(check_key(key), offset, buffer, attempt)

    def read_verified(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """Fill `buffer` from an object that is never replaced, whose digest the caller checks.

        The object is kept open: on HDFS the first read asks the NameNode, later reads go directly
        to DataNodes. The storage's own checksums are verified only by a second attempt, and by all
        attempts once damaged bytes of the object have been read.
        """
        if attempt.follows_damage and len(self._damaged) < _DAMAGED_MAX:
            self._damaged.add(key)
        if attempt.asks_elsewhere or key in self._damaged:
            self._drop_reader(key)
            return self.read_into(key, offset, buffer, attempt)
        attempt.is_checked = True
        try:
            return self._reader(key).read_into(offset, buffer, attempt)
        except BaseException:
            self._drop_reader(key)
            raise

    def _reader(self, key: str) -> Reader:
        return self._opening.do(key, lambda: self._opened(key), lambda: self._open(key))

    def _opened(self, key: str) -> Reader | None:
        with self._lock:
            if (found := self._readers.get(key)) is not None:
                self._readers.move_to_end(key)
            return found

    def _open(self, key: str) -> Reader:
        opened = self.backend.open_reader(check_key(key), is_checked=True)
        with self._lock:
            self._readers[key] = opened
            while len(self._readers) > _READERS_MAX:
                self._readers.popitem(last=False)
        return opened

    def _drop_reader(self, key: str) -> None:
        with self._lock:
            self._readers.pop(key, None)

    def info(self, key: str) -> FileInfo:
        """Return size and time of an object. Raises: NotFoundError."""
        return self.backend.stat_file(check_key(key))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes. Raises: NotFoundError."""
        return self.info(key).size_bytes

    def exists(self, key: str) -> bool:
        """Return whether the object exists now."""
        try:
            self.info(key)
        except NotFoundError:
            return False
        return True

    def publish(
        self, key: str, data: bytes | Path | Iterable[bytes], *, replace: bool = False
    ) -> bool:
        """Store an object atomically and durably; return False if the key exists.

        With `replace`, an existing object is replaced. Of several publishers of a new key exactly
        one gets True. After an error no object is visible; only DeadlineError and UnavailableError
        leave open whether the last step took place.

        Raises: InvalidInputError, NoSpaceError, PermissionDeniedError, UnavailableError,
        DeadlineError.
        """
        check_key(key)
        # In a bucket the creation itself fails for an existing object.
        creates_whole = (
            self.backend.traits.one_step_replace and not self.backend.traits.one_step_rename
        )
        if not replace and not creates_whole and self._occupied(key):
            return False
        self._mark_once()
        self._sweep_once()
        if publish_object(self.backend, key, data, replace=replace):
            return True
        if creates_whole:
            self._occupied(key)  # raises if the key is a folder
        return False

    def _occupied(self, key: str) -> bool:
        try:
            info = self.backend.stat(key)
        except NotFoundError:
            return False
        if info.is_dir:
            raise InvalidInputError(f"{self.url}/{key} is a folder of other objects")
        return True

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        """Return all objects whose key starts with `prefix`, sorted; `FileInfo.path` is the key.

        A prefix with a final "/" selects the objects below one folder.
        """
        folder, _, start = prefix.rpartition("/")
        split_path(folder)
        tree = self.backend.list_tree(folder)
        if tree is None:
            return self._walk(folder, start)
        return (
            info
            for info in tree
            if info.path.startswith(prefix)
            and info.path.partition("/")[0] not in _HIDDEN
            and info.path.count("/") <= _DEPTH_MAX
        )

    def _walk(self, folder: str, start: str) -> Iterator[FileInfo]:
        try:
            infos = list(self.backend.list(folder))
        except NotFoundError:
            return
        skip = len(folder) + 1 if folder else 0
        # A folder is sorted as "name/", as its keys are, so that the walk is in the order of keys.
        infos.sort(key=lambda info: info.path + "/" if info.is_dir else info.path)
        for info in infos:
            name = info.path[skip:]
            if not name.startswith(start) or (not folder and name in _HIDDEN):
                continue
            if info.is_dir:
                if info.path.count("/") < _DEPTH_MAX:
                    yield from self._walk(info.path, "")
            else:
                yield info

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is no error."""
        with contextlib.suppress(NotFoundError):
            self.info(key)
            self.backend.delete_files([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects by as few requests as possible. Missing objects are no error.

        After an error some of the objects may be left.
        """
        self.backend.delete_files([check_key(key) for key in keys])

    def lease(
        self, key: str, *, ttl_s: float, owner: str, watch: LeaseWatch | None = None
    ) -> Lease | None:
        """Take the lease at `key` for `ttl_s` seconds; return None while another node holds it.

        The lease of a dead holder can be taken once it has expired; see `lease`. A caller that asks
        repeatedly passes the same `watch`: then a wrong clock of the holder does not matter.
        """
        self._mark_once()
        return acquire(self.backend, check_key(key), ttl_s=ttl_s, owner=owner, watch=watch)

    def time_ns(self) -> int:
        """Return the time by the storage's clock, by writing and removing a file."""
        return storage_time_ns(self.backend, f"{TEMPORARY}/{os.urandom(16).hex()}")

    def sweep(self, older_than_s: float = STALE_AFTER_S) -> int:
        """Remove temporary files of dead publishers; return the number of removed files."""
        age_ns = int(older_than_s * 1e9)
        limit_ns = time.time_ns() - age_ns
        stale: list[FileInfo] = []
        with contextlib.suppress(NotFoundError):
            stale += (one for one in self.backend.list(TEMPORARY) if one.modified_ns < limit_ns)
        if not stale:
            return 0
        # This node's clock may be ahead of the storage's, and these files may be in use.
        limit_ns = min(limit_ns, self.time_ns() - age_ns)
        stale = [info for info in stale if info.modified_ns < limit_ns]
        self.backend.delete_files([info.path for info in stale if not info.is_dir])
        for info in stale:
            if info.is_dir:
                self.backend.delete(info.path, recursive=True)
        return len(stale)

    def _mark_once(self) -> None:
        """Mark the folder as a store, before the first write; see `marked_folder.mark_store`.

        Raises: BootseerError.
        """
        # Without a lock, so that threads do not wait one after the other for a folder that hangs.
        if self._folder is not None and not self._is_marked:
            root, memory = self._folder.root, self._memory
            sentence = self._folder.within_deadline(
                "begin a store in", "", lambda: mark_store(root, memory)
            )
            with self._lock:
                is_first, self._is_marked = not self._is_marked, True
            if sentence and is_first:
                self._say(sentence)

    def _sweep_once(self) -> None:
        if not self.backend.traits.one_step_rename:
            return  # objects are published without temporary files
        with self._lock:
            if self._swept:
                return
            self._swept = True
        try:
            self.sweep()
        except BootseerError as error:
            logger.warning("cannot sweep %s/%s: %s", self.url, TEMPORARY, error)

    def close(self) -> None:
        """Release the backend. Idempotent."""
        with self._lock:
            self._readers.clear()
        self.backend.close()


def check_key(key: str) -> str:
    """Return `key` if it is valid. Raises: InvalidInputError."""
    names = split_path(key)
    is_listed = 0 < len(names) <= _DEPTH_MAX + 1 and names[0] not in _HIDDEN
    if not is_listed or len(key) > KEY_MAX_BYTES:
        raise InvalidInputError(f"{key[:80]!r} is not a key of a store")
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the key {key!r} is not UTF-8") from error
    if size_bytes > KEY_MAX_BYTES:
        raise InvalidInputError(f"the key {key[:80]!r} is longer than {KEY_MAX_BYTES} bytes")
    return key


def storage_time_ns(backend: Backend, path: str) -> int:
    """Return the time by the storage's clock, in nanoseconds since 1970.

    The time is that of a new file, which is written at `path` and removed again; 0 if the storage
    has no times. For `oci://` it is the clock of this node, since objects there have the time of
    the node that wrote them.

    Raises: PermissionDeniedError, NoSpaceError, UnavailableError, DeadlineError.
    """
    with backend.create(path) as writer:
        writer.write(b"\n")
    try:
        return backend.stat(path).modified_ns
    finally:
        with contextlib.suppress(BootseerError):
            backend.delete_files([path])
