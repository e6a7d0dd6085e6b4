"""Verification of files: all their bytes are read, past every cache, and damaged blocks are listed.

Reads only. Thread-safe. Memory: a few MiB for each thread, whatever sizes a layout names.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import xxhash
from msgspec import Struct

from bootseer.errors import BootseerError, DeadlineError, NotFoundError
from bootseer.fuse.striped.layout import Segment, block_checksum
from bootseer.fuse.striped.view import FileView, generation_folder, pieces
from bootseer.store.backend import Backend

_STEP_BYTES = 4 * 2**20
_AT_ONCE = 64


class PartFault(Struct, frozen=True):
    """A part that is missing, or has another size than the layout says."""

    path: str
    """The part, relative to the storage's URL."""
    expected_bytes: int
    found_bytes: int | None
    """None if the part is missing."""
    offset: int
    """Offset in the file of the part's first missing byte."""

    @property
    def reason(self) -> str:
        """`missing`, `short` or `long`."""
        if self.found_bytes is None:
            return "missing"
        return "short" if self.found_bytes < self.expected_bytes else "long"


class Damage(Struct, frozen=True):
    """Consecutive bytes of a file that cannot be read as they were written."""

    stored_path: str
    """The part, or the ordinary file itself, relative to the storage's URL."""
    stored_offset: int
    offset: int
    """Offset in the file of the first damaged byte."""
    length: int
    """Number of damaged bytes of the file; for a missing part, the whole part."""
    reason: str
    """`checksum`, `missing`, `short` or `unreadable`."""


class _Run(Struct, frozen=True):
    """Bytes of one stored file, contiguous there and in the logical file."""

    stored_path: str
    stored_offset: int
    offset: int
    length: int
    block_bytes: int
    checksums: tuple[int, ...]
    """The checksum of each block; none for an ordinary file."""


def verify_file(
    backend: Backend,
    view: FileView,
    threads: ThreadPoolExecutor,
    on_progress: Callable[[int], None] = lambda count: None,
) -> list[Damage]:
    """Read a whole file, and return its damages in the order of its bytes.

    A block that does not match is read again before it counts: another replica may answer.
    `on_progress` receives numbers of bytes, from several threads. Raises: DeadlineError if the
    storage does not answer at all.
    """
    damages: list[Damage] = []
    for fault in part_faults(backend, view):
        if fault.reason != "long":
            found = fault.found_bytes or 0
            missing = fault.expected_bytes - found
            damages.append(Damage(fault.path, found, fault.offset, missing, fault.reason))
    gone = {damage.stored_path for damage in damages}
    todo = (run for run in _runs(view) if run.stored_path not in gone)
    while batch := list(islice(todo, _AT_ONCE)):
        for damaged in threads.map(lambda run: _check(backend, run, on_progress), batch):
            damages += damaged
    return sorted(damages, key=lambda damage: damage.offset)


def part_faults(backend: Backend, view: FileView) -> Iterator[PartFault]:
    """Yield the parts of a file that are missing or have a wrong size. Reads listings only."""
    base = 0
    for segment in view.layout.segments if view.layout else ():
        folder = generation_folder(view.directory, segment.generation)
        try:
            sizes = {info.path: info.size_bytes for info in backend.list(folder)}
        except NotFoundError:
            sizes = {}
        for index, part in enumerate(segment.parts):
            path = f"{folder}/{part.name}"
            found = sizes.get(path)
            if found != part.size_bytes:
                offset = base + _logical(segment, index, min(found or 0, part.size_bytes))
                yield PartFault(path, part.size_bytes, found, offset)
        base += segment.size_bytes


def _logical(segment: Segment, part: int, stored_offset: int) -> int:
    """Return the offset in the segment of the byte at `stored_offset` of a part."""
    unit, count = segment.stripe_unit_bytes, len(segment.parts)
    return (stored_offset // unit * count + part) * unit + stored_offset % unit


def _runs(view: FileView) -> Iterator[_Run]:
    """Yield the whole file in runs of whole blocks, of a few MiB if the blocks are not larger."""
    if view.layout is None:
        for start in range(0, view.size_bytes, _STEP_BYTES):
            length = min(_STEP_BYTES, view.size_bytes - start)
            yield _Run(view.path, start, start, length, length, ())
        return
    base = 0
    for segment in view.layout.segments:
        folder = generation_folder(view.directory, segment.generation)
        block = segment.block_bytes
        step = max(block, min(_STEP_BYTES // block * block, segment.stripe_unit_bytes))
        for unit_start in range(0, segment.size_bytes, segment.stripe_unit_bytes):
            unit_end = min(unit_start + segment.stripe_unit_bytes, segment.size_bytes)
            for start in range(unit_start, unit_end, step):
                length = min(step, unit_end - start)
                (piece,) = pieces(segment, start, length)
                first = start // block
                yield _Run(
                    f"{folder}/{segment.parts[piece.part].name}",
                    piece.part_offset,
                    base + start,
                    length,
                    block,
                    tuple(segment.checksum(first + i) for i in range(-(-length // block))),
                )
        base += segment.size_bytes


def _check(backend: Backend, run: _Run, on_progress: Callable[[int], None]) -> list[Damage]:
    damages = []
    whole = _read(backend, run, 0, run.length) if run.length <= _STEP_BYTES else None
    for number, at in enumerate(range(0, run.length, run.block_bytes)):
        length = min(run.block_bytes, run.length - at)
        wanted = run.checksums[number] if run.checksums else None
        data = whole[at : at + length] if isinstance(whole, memoryview) else None
        if data is None or (wanted is not None and block_checksum(data) != wanted):
            reason = _reason(backend, run, at, length, wanted)
            if reason:
                stored = run.stored_offset + at
                damages.append(Damage(run.stored_path, stored, run.offset + at, length, reason))
        on_progress(length)
    return damages


def _reason(backend: Backend, run: _Run, at: int, length: int, wanted: int | None) -> str:
    """Read one block by itself. Return the reason why it is damaged, or ""."""
    digest = xxhash.xxh3_64()
    for position in range(0, length, _STEP_BYTES):
        piece = _read(backend, run, at + position, min(_STEP_BYTES, length - position))
        if isinstance(piece, str):
            return piece
        digest.update(piece)
    return "" if wanted is None or digest.intdigest() == wanted else "checksum"


def _read(backend: Backend, run: _Run, at: int, length: int) -> memoryview | str:
    """Return bytes of a run, or the reason why there are none."""
    buffer = memoryview(bytearray(length))
    try:
        count = backend.read_into(run.stored_path, run.stored_offset + at, buffer)
    except DeadlineError:
        raise
    except NotFoundError:
        return "missing"
    except BootseerError:
        return "unreadable"
    return buffer if count == length else "short"
