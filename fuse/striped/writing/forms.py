"""The two forms in which a large file is stored: striped, or as one ordinary file.

A form stores the bytes that a `FileWriter` sends, and publishes them. It belongs to one writer and
is protected by the writer's lock.

    no parts --send--> PartSet --publish--> stored, without a name --commit--> published
                          +--close--> removed    +--close, or a failed commit--> removed
"""

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from bootseer.errors import UnsupportedError
from bootseer.fuse.striped.layout import (
    HEADER_BYTES,
    MAGIC,
    MAX_PART_COUNT,
    MAX_SEGMENT_COUNT,
    Layout,
    Segment,
)
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView, new_generation
from bootseer.fuse.striped.writing.part_set import PartSet, Round, UnitAssignment, WriterResources
from bootseer.fuse.striped.writing.tail import Tail
from bootseer.store.backend import Piece

RUN_UNITS = 8
"""Units in a run of a plain file. Runs become blocks: 32 MiB each with units of 4 MiB, so that the
units on their way at 8 runs are half of the memory that a mount has by default, and HDFS's usual
limit of 10,000 blocks allows files of 312 GiB."""
_ENDLESS = 1 << 62


class Form(ABC):
    """Stored bytes of a file that is being written: all bytes before its tail."""

    def __init__(self, shared: WriterResources, path: str, settings: StripeSettings) -> None:
        self.path = path
        """Path of the file, which changes if the file is renamed while it is written."""
        self.sent_bytes = 0
        """Length of the file without its tail."""
        self._shared = shared
        self._settings = settings
        self._parts: PartSet | None = None
        self._unnamed: set[str] = set()
        """Stored generations that no published layout names."""

    @property
    def has_new_parts(self) -> bool:
        """Whether parts were written that no published generation of the file names."""
        return self._parts is not None or bool(self._unnamed)

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        """Take the next unit; full, unless `publish` follows. Raises: as `PartSet.send`."""
        if self._parts is None:
            deadline_s = self._settings.patience_s
            self._parts = PartSet(self._shared, self.path, self._assignment(), deadline_s)
        self._parts.send(pieces, length, cancelled)
        self.sent_bytes += length

    @abstractmethod
    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        """Publish everything that was sent, and `tail`, as the file.

        Bytes that may still change stay in `tail`. `expected`: the identity of the file that is
        replaced; any file by default.
        """

    def store_nameless(self, tail: Tail, cancelled: Callable[[], bool]) -> FileView | None:
        """Make everything that was sent, and `tail`, durable and readable until `close`.

        Return None, and store nothing, in a form that cannot be read without its name.
        """
        return None

    def close(self, wait_s: float = 0.0) -> None:
        """Remove the unpublished parts, waiting at most `wait_s`.

        Idempotent; never raises.
        """
        if self._parts is not None:
            self._parts.abort(wait_s)
            self._parts = None
        if self._unnamed:
            self._shared.tree.discard(self.path, set(self._unnamed))
            self._unnamed.clear()

    @abstractmethod
    def _assignment(self) -> UnitAssignment: ...

    def _finish(self, tail: Tail, cancelled: Callable[[], bool]) -> list[Round]:
        """Store `tail` and everything that was sent; return the rounds since the last publish."""
        if tail.length:
            self.send(tail.pieces(), tail.length, cancelled)
            tail.clear()
        if self._parts is None:
            return []
        rounds = self._parts.finish()
        self._unnamed.update(each.generation for each in rounds)
        self._parts = None
        return rounds


class StripedForm(Form):
    """Segments of parts, and a layout that names them.

    On a file system each segment has `stripe_count` parts, to which the units are written in turn.
    On an object store, which takes only whole objects, every unit is an object: a unit fits into
    memory until it is stored, so no disk is needed.
    """

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        segments: tuple[Segment, ...] = (),
    ) -> None:
        """`segments`: the stored beginning of the file, in the same directory."""
        super().__init__(shared, path, settings)
        self._segments = list(segments)
        self.sent_bytes = sum(segment.size_bytes for segment in segments)

    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        layout, growing = self._store(tail, cancelled)
        view = self._shared.tree.publish_layout(
            self.path, layout, expected, before_commit=self._unnamed.clear
        )
        self._take_back(growing, tail)
        return view

    def store_nameless(self, tail: Tail, cancelled: Callable[[], bool]) -> FileView:
        layout, growing = self._store(tail, cancelled)
        self._take_back(growing, tail)
        return FileView(self.path, layout.generation, layout.size_bytes, time.time_ns(), layout)

    def _store(self, tail: Tail, cancelled: Callable[[], bool]) -> tuple[Layout, bytes]:
        """Store everything, and return the layout and the bytes of its last segment.

        The bytes are returned only if they are all of that segment and may still grow.
        """
        growing = tail.join() if self._parts is None else b""
        assignment = self._assignment()
        self._segments += [each.segment(assignment) for each in self._finish(tail, cancelled)]
        if len(self._segments) > MAX_SEGMENT_COUNT:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        return Layout(new_generation(), tuple(self._segments)), growing

    def _take_back(self, growing: bytes, tail: Tail) -> None:
        """Put a segment of less than a unit back into the tail, to be written again."""
        if growing and len(growing) < self._settings.stripe_unit_bytes:
            self._segments.pop()
            self.sent_bytes -= len(growing)
            tail.append(growing)

    def _assignment(self) -> UnitAssignment:
        settings = self._settings
        is_object_store = not self._shared.backend.traits.one_step_rename
        return UnitAssignment(
            settings.stripe_unit_bytes,
            settings.block_bytes,
            settings.stripe_count,
            is_exact=settings.is_exact,
            run_units=1 if is_object_store else None,
            parts_max=MAX_PART_COUNT if is_object_store else None,
        )


class PlainForm(Form):
    """Ordinary file that every tool of the storage reads, or bytes that are appended to one.

    If the storage can join files, the runs of a file are written in parallel, each to its own file,
    and joined in one step; else there is one run. In both cases the whole file appears at once.
    """

    def __init__(
        self,
        shared: WriterResources,
        path: str,
        settings: StripeSettings,
        base: FileView | None = None,
    ) -> None:
        """`base`: the stored file to append to. Raises: UnsupportedError if that is impossible."""
        super().__init__(shared, path, settings)
        self._base = base
        self._can_join = shared.backend.can_join()
        self._check_can_append()
        self.sent_bytes = base.size_bytes if base else 0

    def send(self, pieces: list[Piece], length: int, cancelled: Callable[[], bool]) -> None:
        self._check_can_append()
        super().send(pieces, length, cancelled)

    def publish(self, tail: Tail, expected: str | None, cancelled: Callable[[], bool]) -> FileView:
        (part_round,) = self._finish(tail, cancelled)
        run, *more = part_round.paths()
        if more:
            self._shared.backend.join(run, more)
        self._base = self._shared.tree.publish_run(
            self.path,
            run,
            expected,
            appends=self._base is not None,
            before_commit=self._unnamed.clear,
        )
        self._shared.tree.discard(self.path, {part_round.generation})
        return self._base

    def _assignment(self) -> UnitAssignment:
        settings = self._settings
        return UnitAssignment(
            settings.stripe_unit_bytes,
            settings.block_bytes,
            settings.stripe_count if self._can_join else 1,
            run_units=RUN_UNITS if self._can_join else _ENDLESS,
            is_striped=False,
        )

    def _check_can_append(self) -> None:
        if self._base is not None and not self._can_join:
            raise UnsupportedError(
                f"{self.path} is an ordinary file on a storage that cannot join files; it can be "
                "replaced, not appended to"
            )


def begin_form(shared: WriterResources, path: str, settings: StripeSettings, start: Tail) -> Form:
    """Return the form of a new large file that begins with `start`."""
    # Content that looks like a layout must not be stored as an ordinary file.
    if not looks_like_layout(start):
        directory = path.rpartition("/")[0]
        if settings.layout_in(shared.backend, directory) == "plain":
            return PlainForm(shared, path, settings)
    return StripedForm(shared, path, settings)


def continue_form(
    shared: WriterResources, path: str, settings: StripeSettings, base: FileView
) -> tuple[Form | None, Tail]:
    """Return the form of an existing file for appending, and the file's last bytes.

    The bytes are returned only if they are few enough to be written again.
    Raises UnsupportedError for a file that cannot be appended to.
    """
    unit_bytes = settings.stripe_unit_bytes
    form: Form | None = None
    start = base.size_bytes
    if base.layout is not None:
        kept = list(base.layout.segments)
        if kept[-1].size_bytes < unit_bytes:
            start -= kept.pop().size_bytes
        if kept:
            form = StripedForm(shared, path, settings, tuple(kept))
    elif base.size_bytes > unit_bytes:
        form = PlainForm(shared, path, settings, base)
    else:
        start = 0
    if start == base.size_bytes:
        return form, Tail()
    reader = shared.tree.reader
    file = reader.open(base)
    try:
        return form, Tail(reader.read_bytes(file, start, base.size_bytes - start))
    finally:
        reader.close(file)


def looks_like_layout(start: Tail) -> bool:
    """Return whether a file that begins with `start` could be taken for a layout. Pure."""
    return start.join()[:HEADER_BYTES].startswith(MAGIC)
