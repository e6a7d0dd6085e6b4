"""The store: objects under keys, visible only when whole.

Owns the names inside a store: keys, the hidden folder of temporaries, and how an object becomes
visible. `docs/format/store.md` is its specification. Thread-safe. A key is "a/b/c": plain
components, at most 1024 bytes, and no key is the folder of another.
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
from bootseer.store.local.marked_folder import MARK, admit, remember
from bootseer.store.objects.lease import Lease, LeaseWatch, acquire
from bootseer.store.objects.publish import TEMPORARY, publish_object
from bootseer.store.once import Once
from bootseer.store.paths import split_path
from bootseer.transfer.attempt import Attempt

logger = logging.getLogger(__name__)

KEY_MAX_BYTES = 1024
_DEPTH_MAX = 32
# More blobs than an image has layers, mostly; each has a descriptor, or what a NameNode has said.
_READERS_MAX = 64
_DOUBTED_MAX = 1024
_HIDDEN = (TEMPORARY, MARK)
# A publish that took longer than this is dead. Compared with the storage's own clock, so it
# must exceed any clock skew by far.
STALE_AFTER_S = 24 * 3600


class Store(Closing):
    """Objects under keys in one backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        memory: Path | None = None,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """`memory`: where this node remembers which folders it has used as stores; `say` gets a
        sentence where a new one begins."""
        self.backend = backend
        # Only folders carry marks.
        self._folder = backend if isinstance(backend, IsFolder) else None
        self._memory = memory
        self._say = say
        self._is_admitted = False
        self._is_remembered = False
        self._swept = False
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._opening = Once()
        self._doubted: set[str] = set()
        """Keys of objects of which damaged bytes have come."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The root URL, without credentials."""
        return self.backend.url

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes `[offset, offset + length)` of an object; shorter only at its end.

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
        """Fill `buffer` from `offset`; the count is short only at the end of the object, or when
        `attempt` was given up."""
        return self.backend.read_into(check_key(key), offset, buffer, attempt)

    def read_verified(self, key: str, offset: int, buffer: memoryview, attempt: Attempt) -> int:
        """As `read_into`, for content whose digest the caller checks: the object is kept open.

        The storage's own checksums are asked only of an attempt that follows another one, and for
        an object of which damaged bytes have come. On HDFS the first read of an object asks the
        NameNode, and the others go straight to its DataNodes. For objects that are never replaced.
        """
        if attempt.follows_damage and len(self._doubted) < _DOUBTED_MAX:
            self._doubted.add(key)
        if attempt.is_second or key in self._doubted:
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
        """Size and time of an object. Raises: NotFoundError."""
        return self.backend.stat_file(check_key(key))

    def size(self, key: str) -> int:
        """Bytes of an object. Raises: NotFoundError."""
        return self.info(key).size_bytes

    def exists(self, key: str) -> bool:
        """Whether the object is there now."""
        try:
            self.info(key)
        except NotFoundError:
            return False
        return True

    def publish(
        self, key: str, data: bytes | Path | Iterable[bytes], *, replace: bool = False
    ) -> bool:
        """Store an object; readers see nothing of it, or all. Durable when it returns.

        False: the key was there already and `replace` is not set; nothing changed. Of several
        publishers of a new key exactly one gets True. After an error nothing is visible, but for
        DeadlineError and UnavailableError, which leave open whether the last step took place.

        Raises: InvalidInputError, NoSpaceError, PermissionDeniedError, UnavailableError,
        DeadlineError.
        """
        check_key(key)
        # In an object store the creation itself looks, and decides.
        creates_whole = (
            self.backend.traits.one_step_replace and not self.backend.traits.one_step_rename
        )
        if not replace and not creates_whole and self._occupied(key):
            return False
        self._admit_once()
        self._sweep_once()
        if publish_object(self.backend, key, data, replace=replace):
            return True
        if creates_whole:
            self._occupied(key)  # what is there may be a folder
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
        """Every object whose key starts with `prefix`, sorted by key; `path` is the key.

        End the prefix with "/" for what is in one folder. Nothing there: nothing is yielded.
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
        # A folder sorts as its keys do, by "name/": so the whole walk is in the order of keys.
        infos.sort(key=lambda info: info.path + "/" if info.is_dir else info.path)
        for info in infos:
            name = info.path[skip:]
            if not name.startswith(start) or (not folder and name in _HIDDEN):
                continue
            if info.is_dir:
                # Nothing of ours lies deeper; what a stranger has nested must end no listing.
                if info.path.count("/") < _DEPTH_MAX:
                    yield from self._walk(info.path, "")
            else:
                yield info

    def delete(self, key: str) -> None:
        """Remove an object. A missing one is no error."""
        with contextlib.suppress(NotFoundError):
            self.info(key)
            self.backend.delete_files([key])

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, by as few requests as the storage can. Missing ones are no error; after
        an error some are gone and some are not."""
        self.backend.delete_files([check_key(key) for key in keys])

    def lease(
        self, key: str, *, ttl_s: float, owner: str, watch: LeaseWatch | None = None
    ) -> Lease | None:
        """The lease at `key` for `ttl_s` seconds, or None while another holder has it.

        A lease whose holder died can be had when it has expired; see `lease`. Who asks again and
        again gives the same `watch`: then a holder's wrong clock does not matter.
        """
        self._admit_once()
        return acquire(self.backend, check_key(key), ttl_s=ttl_s, owner=owner, watch=watch)

    def time_ns(self) -> int:
        """Return the time by the storage's clock. Writes and removes a file."""
        return storage_time_ns(self.backend, f"{TEMPORARY}/{os.urandom(16).hex()}")

    def sweep(self, older_than_s: float = STALE_AFTER_S) -> int:
        """Remove what publishers that died left behind; returns how many files."""
        age_ns = int(older_than_s * 1e9)
        limit_ns = time.time_ns() - age_ns
        stale: list[FileInfo] = []
        with contextlib.suppress(NotFoundError):
            stale += (one for one in self.backend.list(TEMPORARY) if one.modified_ns < limit_ns)
        if not stale:
            return 0
        # This node's clock may be ahead, and then these are being published.
        limit_ns = min(limit_ns, self.time_ns() - age_ns)
        stale = [info for info in stale if info.modified_ns < limit_ns]
        self.backend.delete_files([info.path for info in stale if not info.is_dir])
        for info in stale:
            if info.is_dir:
                self.backend.delete(info.path, recursive=True)
        return len(stale)

    def _admit_once(self) -> None:
        """Before anything is made in a folder. Raises: UnavailableError where a store was there
        and is not now; BootseerError."""
        # Without a lock: others would wait, one after the other, for a folder that hangs.
        if self._folder is not None and not self._is_admitted:
            root, memory = self._folder.root, self._memory
            sentence = self._folder.within_deadline(
                "begin a store in", "", lambda: admit(root, memory)
            )
            with self._lock:
                is_first, self._is_admitted = not self._is_admitted, True
            if sentence and is_first:
                self._say(sentence)

    def _sweep_once(self) -> None:
        if not self.backend.traits.one_step_rename:
            return  # nothing is published by way of a temporary
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
    """`key`, when it is one. Raises: InvalidInputError."""
    names = split_path(key)
    if not names or names[0] in _HIDDEN or len(key) > KEY_MAX_BYTES:
        raise InvalidInputError(f"{key[:80]!r} is not a key of a store")
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the key {key!r} is not UTF-8") from error
    if size_bytes > KEY_MAX_BYTES:
        raise InvalidInputError(f"the key {key[:80]!r} is longer than {KEY_MAX_BYTES} bytes")
    return key


def storage_time_ns(backend: Backend, path: str) -> int:
    """What the storage's clock says, in nanoseconds since 1970: the time of a new file, which is
    written at `path` and removed again. A node's clock may be days off. 0 where the storage tells
    no times.

    Beside an image in a registry (`oci://`) it is this node's clock: objects there carry the time
    of the node that wrote them. Raises: PermissionDeniedError, NoSpaceError, UnavailableError,
    DeadlineError.
    """
    with backend.create(path) as writer:
        writer.write(b"\n")
    try:
        return backend.stat(path).modified_ns
    finally:
        with contextlib.suppress(BootseerError):
            backend.delete_files([path])
