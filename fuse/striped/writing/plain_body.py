"""The plain form of a file: one ordinary file, which every tool of the storage reads.

Where the storage can join files the runs of a file are written in parallel, each as a file of its
own, and joined in one step; elsewhere there is one run. Either way the name gets the whole.
"""

from collections.abc import Callable

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.body import Body, begin_segment
from bootseer.fuse.striped.writing.parts.unit_assignment import UnitAssignment
from bootseer.fuse.striped.writing.resources import WriterResources
from bootseer.fuse.striped.writing.segment_writer import SegmentWriter
from bootseer.fuse.striped.writing.tail import Tail
from bootseer.store.backend import Piece

RUN_UNITS = 8
"""Units of a run. Runs become blocks: 32 MiB each with units of 4 MiB, so that what is on its way
at 8 runs is half of the memory that a mount has by default, and HDFS's usual limit of 10,000 blocks
allows files of 312 GiB."""


class PlainBody(Body):
    """The runs of one ordinary file, or what is added to one."""

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        base: FileView | None = None,
    ) -> None:
        """`base`: the stored file to add to. Raises UnsupportedError where that cannot be done."""
        self._shared = shared
        self.path = path
        self._settings = settings
        self._base = base
        self._can_join = shared.backend.can_join()
        self._check_can_add()
        self._sent_bytes = base.size_bytes if base else 0
        self._segment: SegmentWriter | None = None
        self._unpublished = ""

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def has_new_parts(self) -> bool:
        return self._segment is not None or bool(self._unpublished)

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        self._check_can_add()
        if self._segment is None:
            self._segment = begin_segment(
                self._shared, self.path, self._settings, self._assignment()
            )
        self._segment.send(pieces, length, cancelled)
        self._sent_bytes += length

    def _assignment(self) -> UnitAssignment:
        settings = self._settings
        self._shared.open_parts.begin_file()
        return UnitAssignment(
            settings.stripe_unit_bytes,
            settings.block_bytes,
            settings.stripe_count if self._can_join else 1,
            run_units=RUN_UNITS if self._can_join else None,
        )

    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        run, generation = self._finish(tail, cancelled)
        self._base = self._shared.tree.publish_run(
            self.path, run, expected, adds=self._base is not None, before_commit=self._forget
        )
        self._shared.tree.discard(self.path, {generation})
        return self._base

    def store_nameless(self, tail: Tail, cancelled: Callable[[], bool]) -> None:
        """Store nothing: runs are read as the file that they become, and become none any more."""

    def _finish(self, tail: Tail, cancelled: Callable[[], bool]) -> tuple[str, str]:
        """Store everything as one run. Return its path and generation."""
        if tail.length:
            self.send(tail.pieces(), tail.length, cancelled)
            tail.clear()
        assert self._segment is not None, "the writer publishes what was written only"
        runs = self._segment.finish_parts()
        generation = self._unpublished = self._segment.generation
        self._segment = None
        self._shared.open_parts.end_file()
        if len(runs) > 1:
            self._shared.backend.join(runs[0], runs[1:])
        return runs[0], generation

    def _forget(self) -> None:
        self._unpublished = ""

    def _check_can_add(self) -> None:
        if self._base is not None and not self._can_join:
            raise UnsupportedError(
                f"{self.path} is an ordinary file on a storage that cannot join files; it can be "
                "replaced, not appended to"
            )

    def close(self, wait_s: float = 0.0) -> None:
        if self._segment is not None:
            self._segment.abort(wait_s)
            self._segment = None
            self._shared.open_parts.end_file()
        if self._unpublished:
            self._shared.tree.discard(self.path, {self._unpublished})
            self._forget()
