"""Which part of a segment each stripe unit is written to. Pure (no I/O, no state)."""

from msgspec import Struct

from bootseer.fuse.striped.layout import MAX_BLOCK_COUNT


class UnitAssignment(Struct, frozen=True):
    """The rule that assigns stripe units to parts, and tells when a segment is full."""

    unit_bytes: int
    block_bytes: int
    """The number of bytes that one checksum covers."""
    writers_max: int
    """How many parts are written at once, where the memory suffices for so many."""
    is_asked_for: bool = False
    """Whether the user asked for this number of parts: then a write fails rather than use fewer."""
    run_units: int | None = None
    """None: consecutive units go to consecutive parts. Otherwise each part is a run of this many
    consecutive units, and is finished as soon as it has them."""
    parts_max: int | None = None
    """The number of parts after which a segment of runs is full."""

    def part_of(self, unit: int, part_count: int) -> int:
        """Returns the number of the part that takes stripe unit number `unit`.

        `part_count`: the number of parts among which consecutive units alternate."""
        return unit % part_count if self.run_units is None else unit // self.run_units

    def ends_part(self, size_bytes: int) -> bool:
        """Returns whether the last part is complete in a segment of `size_bytes`."""
        run = self.run_units
        return run is not None and size_bytes % (run * self.unit_bytes) == 0

    def limit_bytes(self, storage_block_bytes: int, part_count: int) -> int:
        """Returns the size in bytes from which on a segment is full.

        `storage_block_bytes`: the block size of the storage; 0 where it has no blocks, or does not
        tell their size."""
        if self.run_units is not None and self.parts_max is not None:
            return self.parts_max * self.run_units * self.unit_bytes
        limit = MAX_BLOCK_COUNT * self.block_bytes // self.unit_bytes * self.unit_bytes
        if storage_block_bytes:
            # A part of one block stays on the server that was chosen for it, and an HDFS client has
            # the fewest ways to fail.
            units = max(1, storage_block_bytes // self.unit_bytes)
            limit = min(limit, units * self.unit_bytes * part_count)
        return limit
