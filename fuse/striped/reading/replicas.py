"""Several readers for each stored file: a second reader may be served by another disk.

A reader reads each block from the same replica; another reader of the file may get another one.
hdfs-native neither says which DataNode serves nor lets its caller choose. So `Replicas` notes by
reader and block which one was slow, to avoid it, and which one was fast, to use it again.

Thread-safe. Opening waits as long as the backend does.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection

from bootseer.store.backend import Backend, HasDescriptor, Reader
from bootseer.store.single_flight import SingleFlight

# Each reader may get another replica; a block rarely has more than three.
_READERS_MAX = 5
# Each reader holds a descriptor or the places of all blocks. A file that grew has many parts.
_FILES_MAX = 64
_DEFAULT_BLOCK_BYTES = 64 * 2**20


class Replicas:
    """The readers of one stored file."""

    def __init__(self, backend: Backend, path: str, is_checked: bool) -> None:
        self._backend = backend
        self._path = path
        self._is_checked = is_checked
        self._lock = threading.Lock()
        self._readers: dict[int, Reader] = {}
        self._numbers = itertools.count()
        self._opening = SingleFlight()
        self._block_bytes = _DEFAULT_BLOCK_BYTES
        self._slow: set[tuple[int, int]] = set()
        self._good: dict[int, int] = {}
        """Number of the reader that was fast, by block."""

    def pick(self, offset: int, avoided: Collection[int]) -> tuple[int, Reader]:
        """Return the best reader for the block at `offset`, and its number.

        Readers whose number is in `avoided` are not taken where there is another one, or one more
        may be opened. Raises as opening does.
        """
        if avoided:
            return self._best(offset, avoided) or self._open()
        return self._opening.do("", lambda: self._best(offset, ()), self._open)

    def _best(self, offset: int, avoided: Collection[int]) -> tuple[int, Reader] | None:
        """Return the best open reader; None if another one should be opened."""
        with self._lock:
            block = self._block(offset)
            others = [n for n in self._readers if n not in avoided]
            good = self._good.get(block)
            if good in others:
                return good, self._readers[good]
            for number in others:
                if (number, block) not in self._slow:
                    return number, self._readers[number]
            if len(self._readers) >= _READERS_MAX:
                # All readers were slow for this block, so not the replica but the storage is slow.
                number = (others or list(self._readers))[-1]
                return number, self._readers[number]
            return None

    def descriptor(self) -> HasDescriptor | None:
        """Return the file as one that the kernel can read, if it is one. Raises as opening does."""
        reader = self.pick(0, ())[1]
        return reader if isinstance(reader, HasDescriptor) else None

    def was_late(self, number: int, offset: int) -> None:
        """Note that a reader was slow at `offset`."""
        with self._lock:
            block = self._block(offset)
            self._slow.add((number, block))
            if self._good.get(block) == number:
                del self._good[block]

    def was_good(self, number: int, offset: int) -> None:
        """Note that a reader was fast at `offset`."""
        with self._lock:
            block = self._block(offset)
            self._slow.discard((number, block))
            self._good[block] = number

    def drop(self, number: int) -> None:
        """Drop a reader that failed: its knowledge of the file may be out of date."""
        with self._lock:
            self._readers.pop(number, None)

    def _block(self, offset: int) -> int:
        return offset // self._block_bytes

    def _open(self) -> tuple[int, Reader]:
        reader = self._backend.open_reader(self._path, is_checked=self._is_checked)
        with self._lock:
            number = next(self._numbers)
            self._readers[number] = reader
            self._block_bytes = reader.block_bytes or self._block_bytes
            return number, reader


class OpenedParts:
    """The stored files behind one open file. They are closed when this is dropped."""

    def __init__(self, *, are_checked: bool) -> None:
        """`are_checked`: whether the layout has checksums for the bytes."""
        self._are_checked = are_checked
        self._lock = threading.Lock()
        self._replicas: OrderedDict[str, Replicas] = OrderedDict()

    def replicas(self, backend: Backend, path: str) -> Replicas:
        """Return the readers of the stored file at `path`."""
        with self._lock:
            found = self._replicas.get(path)
            if found is None:
                found = self._replicas[path] = Replicas(backend, path, self._are_checked)
                if len(self._replicas) > _FILES_MAX:
                    self._replicas.popitem(last=False)
            else:
                self._replicas.move_to_end(path)
            return found
