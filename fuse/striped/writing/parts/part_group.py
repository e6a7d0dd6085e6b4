"""What the parts of one segment share, as their writers see it."""

from typing import TYPE_CHECKING, Protocol

from bootseer.fuse.striped.memory import MemoryBudget
from bootseer.fuse.striped.statistics import Counters
from bootseer.fuse.striped.writing.kept_units import KeptUnits
from bootseer.fuse.striped.writing.placing.placement import Placement
from bootseer.store.backend import Backend

if TYPE_CHECKING:
    from bootseer.fuse.striped.writing.parts.part_writer import PartWriter


class PartGroup(Protocol):
    """A segment in the making."""

    backend: Backend
    folder: str
    budget: MemoryBudget
    kept: KeptUnits
    placement: Placement
    counters: Counters
    unit_bytes: int
    block_bytes: int
    has_checksums: bool
    """Whether the readers of the parts check them by those that the segment has."""

    @property
    def failed(self) -> bool:
        """Whether nothing of it will be visible."""
        ...

    def note_progress(self) -> None:
        """Something moved: the deadline begins anew."""

    def fail(self, error: BaseException) -> None:
        """Nothing of the segment will be visible."""

    def part_begun(self, part: "PartWriter", *, is_buffered: bool) -> None:
        """Called by the part's thread when the first unit is in its file, which a client of the
        storage holds for us where it `is_buffered`; again with each other file."""

    def part_stored(self, servers: tuple[str, ...]) -> None:
        """A part is on these servers, which count as taken until all of them have ended."""

    def part_ended(self, part: "PartWriter") -> None:
        """Called once, by the part's thread, after its last use of the storage."""
