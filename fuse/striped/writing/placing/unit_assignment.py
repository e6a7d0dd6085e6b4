"""How the units of a segment are dealt to its parts. Pure (no I/O, no state)."""

from msgspec import Struct

from bootseer.fuse.striped.layout import MAX_BLOCK_COUNT


class Dealing(Struct, frozen=True):
    """Which part each unit belongs to, and when a segment is full."""

    unit_bytes: int
    block_bytes: int
    """Checksums are of so much."""
    writers_max: int
    """How many parts are written at once, where there is memory for so many."""
    is_asked_for: bool = False
    """The user has asked for so many: rather none than fewer."""
    run_units: int | None = None
    """None: units are dealt in turn to all parts. Else each part is a run of so many units, and is
    finished as soon as it has them."""
    parts_max: int | None = None
    """A segment of runs is full when it has so many parts."""

    def part_of(self, unit: int, part_count: int) -> int:
        """The part of the unit with this number; `part_count` is how many take turns."""
        return unit % part_count if self.run_units is None else unit // self.run_units

    def ends_part(self, size_bytes: int) -> bool:
        """Whether the last part has all that it will have in a segment of `size_bytes`."""
        run = self.run_units
        return run is not None and size_bytes % (run * self.unit_bytes) == 0

    def limit_bytes(self, storage_block_bytes: int, part_count: int) -> int:
        """With so many, or more, a segment is full; on a storage that cuts files into such
        blocks, or does not (0), or not say."""
        if self.run_units is not None and self.parts_max is not None:
            return self.parts_max * self.run_units * self.unit_bytes
        limit = MAX_BLOCK_COUNT * self.block_bytes // self.unit_bytes * self.unit_bytes
        if storage_block_bytes:
            # A part of one block stays on the server that was chosen for it, and an HDFS client has
            # the fewest ways to fail.
            units = max(1, storage_block_bytes // self.unit_bytes)
            limit = min(limit, units * self.unit_bytes * part_count)
        return limit
