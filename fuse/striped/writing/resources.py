"""Resources that all writers of one storage share. Thread-safe, as each of them is."""

from msgspec import Struct

from bootseer.fuse.striped.names.striped_tree import StripedTree
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.writing.write_memory import WriteMemory
from bootseer.store.backend import Backend


class WriterResources(Struct, frozen=True, eq=False):
    """Shared objects that each `FileWriter` of a storage uses."""

    backend: Backend
    tree: StripedTree
    """Publishes the files."""
    memory: WriteMemory
    counters: Counters
