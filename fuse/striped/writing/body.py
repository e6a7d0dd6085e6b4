"""What of a file was handed to the storage already, and how it becomes the file.

Owns the choice between the two forms: `striped_body` and `plain_body`. A body belongs to one
`FileWriter`, whose lock it relies on.
"""

from collections.abc import Callable
from typing import Protocol

from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.parts.unit_assignment import UnitAssignment
from bootseer.fuse.striped.writing.resources import WriterResources
from bootseer.fuse.striped.writing.segment_writer import SegmentWriter
from bootseer.fuse.striped.writing.tail import Tail
from bootseer.store.backend import Piece


class Body(Protocol):
    """The bytes before the tail."""

    path: str
    """The path of the file; changes when it is renamed while it is written."""

    @property
    def sent_bytes(self) -> int:
        """How many they are."""
        ...

    @property
    def has_new_parts(self) -> bool:
        """Whether parts lie beside the file that no published generation of it names."""
        ...

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        """Take the next unit; full, unless `publish` follows. Raises: as `SegmentWriter.send`."""
        ...

    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        """Make all that was sent, and `tail`, the file. What may still change stays in `tail`."""
        ...

    def store_nameless(self, tail: Tail, cancelled: Callable[[], bool]) -> FileView | None:
        """Make all that was sent, and `tail`, durable, and no file: it can be read until `close`.

        Return None in a form that cannot be read like this.
        """
        ...

    def close(self, wait_s: float = 0.0) -> None:
        """What was not published vanishes. Idempotent, never raises."""
        ...


def begin_segment(
    shared: WriterResources,
    path: str,
    settings: StripeSettings,
    assignment: UnitAssignment,
    follows: SegmentWriter | None = None,
) -> SegmentWriter:
    """A new segment of the file at `path`; it `follows` one that is sealed."""
    return SegmentWriter(
        shared.backend,
        path.rpartition("/")[0],
        shared.kept,
        shared.open_parts,
        shared.placement,
        shared.budget,
        shared.counters,
        assignment,
        settings.patience_s,
        follows,
    )
