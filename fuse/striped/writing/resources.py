"""Resources that all writers of one storage share. Thread-safe, as each of them is."""

from msgspec import Struct

from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.names.tree import StripedTree
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.writing.kept_units import KeptUnits
from bootseer.fuse.striped.writing.parts.open_parts import OpenParts
from bootseer.fuse.striped.writing.parts.placement import Placement
from bootseer.store.backend import Backend


class WriterResources(Struct, frozen=True, eq=False):
    """Everything that a `FileWriter` uses beside its own file."""

    backend: Backend
    tree: StripedTree
    """Publishes the files."""
    budget: MemoryBudget
    kept: KeptUnits
    """Units of all files that the storage may ask for once more."""
    open_parts: OpenParts
    placement: Placement
    counters: Counters
