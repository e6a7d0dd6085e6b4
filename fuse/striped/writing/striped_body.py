"""The striped form of a file: segments of parts, and a layout that names them.

On a file system each segment has `stripe_count` parts, written as the units come. On an object
store every unit is an object: it takes objects only as a whole, and holding one unit in memory
until it is stored needs no disk, and no more memory than any other writer.
"""

import errno
import os
import time
from collections.abc import Callable

from bootseer.fuse.striped.layout import MAX_PART_COUNT, MAX_SEGMENT_COUNT, Layout, Segment
from bootseer.fuse.striped.names.stored import new_generation
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.body import Body, begin_segment
from bootseer.fuse.striped.writing.parts.unit_assignment import UnitAssignment
from bootseer.fuse.striped.writing.resources import WriterResources
from bootseer.fuse.striped.writing.segment_writer import SegmentWriter
from bootseer.fuse.striped.writing.tail import Tail
from bootseer.store.backend import Piece


class StripedBody(Body):
    """Segments: those of the file so far, and those in the making."""

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        segments: tuple[Segment, ...] = (),
    ) -> None:
        """`segments` are stored already, in the same directory."""
        self._shared = shared
        self.path = path
        self._settings = settings
        self._segments = list(segments)
        self._open: list[SegmentWriter] = []
        """The last one takes units, the others are full."""
        self._unpublished: set[str] = set()
        self._sent_bytes = sum(segment.size_bytes for segment in segments)
        self._is_counted = False

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def has_new_parts(self) -> bool:
        return bool(self._open or self._unpublished)

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        if not self._open or self._open[-1].is_full:
            sealed = self._open[-1] if self._open else None
            if sealed is not None:
                sealed.seal()
            segment = begin_segment(
                self._shared, self.path, self._settings, self._assignment(), sealed
            )
            self._open.append(segment)
            self._unpublished.add(segment.generation)
        for segment in self._open:
            segment.check()
        self._open[-1].send(pieces, length, cancelled)
        self._sent_bytes += length

    def _assignment(self) -> UnitAssignment:
        settings = self._settings
        if not self._is_counted:
            self._is_counted = True
            self._shared.open_parts.begin_file()
        is_object_store = not self._shared.backend.traits.one_step_rename
        return UnitAssignment(
            settings.stripe_unit_bytes,
            settings.block_bytes,
            settings.stripe_count,
            is_asked_for=settings.is_exact,
            run_units=1 if is_object_store else None,
            parts_max=MAX_PART_COUNT if is_object_store else None,
        )

    def _end_counting(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._shared.open_parts.end_file()

    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        layout, kept = self._finish(tail, cancelled)
        view = self._shared.tree.publish_layout(
            self.path, layout, expected, before_commit=self._unpublished.clear
        )
        self._keep(kept, tail)
        return view

    def store_nameless(self, tail: Tail, cancelled: Callable[[], bool]) -> FileView:
        layout, kept = self._finish(tail, cancelled)
        self._keep(kept, tail)
        return FileView(self.path, layout.generation, layout.size_bytes, time.time_ns(), layout)

    def _finish(self, tail: Tail, cancelled: Callable[[], bool]) -> tuple[Layout, bytes]:
        """Store everything. Return its layout, and the last bytes of it if they may still grow."""
        # A last segment of less than a unit may grow: it is written again with what follows.
        kept = tail.join() if not self._open else b""
        if tail.length:
            self.send(tail.pieces(), tail.length, cancelled)
            tail.clear()
        while self._open:
            self._segments.append(self._open[0].finish())
            del self._open[0]
        self._end_counting()
        if len(self._segments) > MAX_SEGMENT_COUNT:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        return Layout(new_generation(), tuple(self._segments)), kept

    def _keep(self, kept: bytes, tail: Tail) -> None:
        if kept and len(kept) < self._settings.stripe_unit_bytes:
            self._segments.pop()
            self._sent_bytes -= len(kept)
            tail.append(kept)

    def close(self, wait_s: float = 0.0) -> None:
        for segment in self._open:
            # It removes its own parts once nobody writes to them any more.
            self._unpublished.discard(segment.generation)
            segment.abort(wait_s)
        self._open.clear()
        self._end_counting()
        if self._unpublished:
            self._shared.tree.discard(self.path, set(self._unpublished))
            self._unpublished.clear()
