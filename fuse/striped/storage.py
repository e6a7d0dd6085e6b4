"""Assembly of the objects with which one process reads and writes striped files of one URL.

`StripedStorage` makes and closes backend, memory, reader, tree and writers. The mount and the copy
functions use it. Thread-safe.
"""

from bootseer.base.closing import Closing
from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.memory import Memory
from bootseer.fuse.striped.names.striped_tree import StripedTree
from bootseer.fuse.striped.reading.reader import StripedReader
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.fuse.striped.writing.part_set import WriterResources
from bootseer.fuse.striped.writing.write_memory import WriteMemory
from bootseer.store.backend import Backend

DEFAULT_GRACE_S = 30.0
"""Time for which the parts of a replaced file stay for readers on other nodes."""

# Every server thread may hold two units at once while it waits for a third.
_MIN_UNITS = 16


class StripedStorage(Closing):
    """Striped files over one backend, which is closed with it."""

    def __init__(
        self,
        backend: Backend,
        settings: StripeSettings,
        *,
        memory_bytes: int,
        grace_s: float = DEFAULT_GRACE_S,
        thread_count: int = 20,
    ) -> None:
        """Raises: InvalidInputError if the memory is too small for the stripe unit."""
        least = _MIN_UNITS * settings.stripe_unit_bytes
        if memory_bytes < least:
            raise InvalidInputError(
                f"{memory_bytes} bytes of memory are too few for stripe units of "
                f"{settings.stripe_unit_bytes} bytes; give at least {least}"
            )
        self.backend = backend
        backend.wait_for_servers(settings.patience_s)
        self.settings = settings
        self.memory = Memory(memory_bytes)
        self.counters = Counters()
        self.reader = StripedReader(
            backend,
            self.memory,
            thread_count=thread_count,
            patience_s=settings.patience_s,
            counters=self.counters,
        )
        self.tree = StripedTree(
            backend,
            self.reader,
            self.counters,
            grace_s=grace_s,
            patience_s=settings.patience_s,
        )
        self._writer_resources = WriterResources(
            backend,
            self.tree,
            WriteMemory(self.memory, backend.writer_bytes),
            self.counters,
        )

    def writer(
        self,
        path: str,
        base: FileView | None = None,
        *,
        expected: str | None = None,
        settings: StripeSettings | None = None,
    ) -> FileWriter:
        """Return a writer of the file `path` that starts empty, or appends to `base`.

        `expected`: the identity of the file that it may replace; any file by default. `settings`:
        how the file is stored; as the storage's settings say by default.
        """
        return FileWriter(
            self._writer_resources, path, settings or self.settings, base=base, expected=expected
        )

    def close(self) -> None:
        """Delete replaced parts that are not open, stop the threads and close the backend."""
        self.tree.close()
        self.reader.end_reads()
        self.backend.close()
