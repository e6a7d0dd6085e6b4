"""Reads all that a file is stored in, past every cache, and names each block that is damaged.

Owns the judgement; reading only. Thread-safe. Memory: a few MiB for each thread, whatever sizes a
layout names.
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


class Damage(Struct, frozen=True):
    """A run of bytes of a file that cannot be read as it was written."""

    stored_path: str
    """The part, or the ordinary file itself, relative to the storage's URL."""
    stored_offset: int
    offset: int
    """The offset in the file of the first byte that is damaged."""
    length: int
    """Bytes of the file that are concerned; for a part that is missing, all of the part."""
    reason: str
    """`checksum`, `missing`, `short` or `unreadable`."""


_STEP_BYTES = 4 * 2**20
_AT_ONCE = 64


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
    """Everything that is wrong with a file, in the order of its bytes; [] when nothing is.

    What does not match is read once more before it counts: another replica may answer.
    `on_progress` is told bytes, from several threads. Raises: DeadlineError when the storage does
    not answer at all.
    """
    damages: list[Damage] = []
    gone: set[str] = set()
    for part in _parts(backend, view, damages):
        gone.add(part)
    todo = (run for run in _runs(view) if run.stored_path not in gone)
    while batch := list(islice(todo, _AT_ONCE)):
        for found in threads.map(lambda run: _check(backend, run, on_progress), batch):
            damages += found
    return sorted(damages, key=lambda damage: damage.offset)


def _parts(backend: Backend, view: FileView, damages: list[Damage]) -> Iterator[str]:
    """The parts that are missing or too short, each noted once."""
    base = 0
    for segment in view.layout.segments if view.layout else ():
        folder = generation_folder(view.directory, segment.generation)
        for index, part in enumerate(segment.parts):
            path = f"{folder}/{part.name}"
            first = base + index * segment.stripe_unit_bytes
            try:
                size = backend.stat(path).size_bytes
            except NotFoundError:
                damages.append(Damage(path, 0, first, part.size_bytes, "missing"))
                yield path
                continue
            if size < part.size_bytes:
                offset = base + _logical(segment, index, size)
                damages.append(Damage(path, size, offset, part.size_bytes - size, "short"))
                yield path
        base += segment.size_bytes


def _logical(segment: Segment, part: int, stored_offset: int) -> int:
    """Returns the offset in the segment of the byte at `stored_offset` of a part."""
    unit, count = segment.stripe_unit_bytes, len(segment.parts)
    return (stored_offset // unit * count + part) * unit + stored_offset % unit


def _runs(view: FileView) -> Iterator[_Run]:
    """The whole file, in runs of whole blocks and of a few MiB where blocks allow that."""
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
    """What is wrong with one block, read by itself; "" when nothing is."""
    digest = xxhash.xxh3_64()
    for position in range(0, length, _STEP_BYTES):
        piece = _read(backend, run, at + position, min(_STEP_BYTES, length - position))
        if isinstance(piece, str):
            return piece
        digest.update(piece)
    return "" if wanted is None or digest.intdigest() == wanted else "checksum"


def _read(backend: Backend, run: _Run, at: int, length: int) -> memoryview | str:
    """Bytes of a run, or why there are none."""
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
