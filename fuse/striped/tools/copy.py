"""Copying of files into, out of and between striped trees, or into memory, without a mount.

`convert_file` stores a file in another form: striped, plain, or striped otherwise. The new content
is complete and durable before it replaces the old content, in one step, and only if the old content
is still there. If the process is killed, the file stays as it was, and fsck finds the bytes written
so far. Functions may be called from any thread.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.errors import BusyError, InvalidInputError, from_oserror
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES, Layout
from bootseer.fuse.striped.reading.opened import OpenFile
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.file_writer import FileWriter
from bootseer.settings.config import Settings
from bootseer.store import open_backend
from bootseer.store.local.beneath import sync_directory

_STEP_BYTES = 4 * 2**20
# Wait for the parts of a failed copy to be removed before its error is raised.
_CLOSE_WAIT_S = 5.0
# One unit of every part of a file with the default form: that much is fetched at once anyway.
_DIRECT_BYTES = DEFAULT_STRIPE_UNIT_BYTES * DEFAULT_STRIPE_COUNT
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def _ignore(count: int) -> None:
    pass


def open_storage(
    settings: Settings,
    url: str,
    *,
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
    stripe_count: int = DEFAULT_STRIPE_COUNT,
    layout: LayoutKind = "striped",
) -> StripedStorage:
    """Return the striped tree at `url`, which the caller closes. Raises: InvalidInputError."""
    stripes = StripeSettings(stripe_unit_bytes, stripe_count, settings.deadline_s, layout)
    return StripedStorage(
        open_backend(url, deadline_s=settings.deadline_s),
        stripes,
        memory_bytes=settings.memory_bytes,
    )


def size_of(storage: StripedStorage, path: str) -> int:
    """Return the size in bytes of the file `path`, striped or not.

    Raises: NotFoundError; InvalidInputError for a directory; CorruptError, UnknownFormatError.
    """
    status = storage.tree.stored.status(path)
    if status.is_dir:
        raise InvalidInputError(f"{storage.backend.url}/{path} is a directory")
    return status.size_bytes


def copy_in(
    storage: StripedStorage,
    source: Path,
    path: str,
    *,
    on_progress: Callable[[int], None] = _ignore,
) -> int:
    """Store the local file `source` as the striped file `path`, atomically.

    `path` is relative to the storage's URL. `on_progress` is called with the bytes of each step.

    Returns: The size in bytes.

    Raises: NotFoundError; BusyError if `source` changes meanwhile; errors of the storage
        (NoSpaceError, UnavailableError, DeadlineError, ...).
    """
    try:
        if not stat.S_ISREG(source.stat().st_mode):
            # A FIFO would wait for its writer, and a device may have no end.
            raise InvalidInputError(f"{source} is not a regular file")
        file = source.open("rb", buffering=0)
    except OSError as error:
        raise from_oserror(error, f"read {source}") from error
    with file:
        writer = storage.writer(path)
        try:
            before = os.fstat(file.fileno())
            while data := _read_local(file, source):
                writer.append(data)
                on_progress(len(data))
            after = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise BusyError(f"{source} was written to while it was copied; copy it again")
            writer.publish()
            return writer.size_bytes
        finally:
            writer.close(_CLOSE_WAIT_S)


def copy_out(
    storage: StripedStorage,
    path: str,
    target: Path,
    *,
    on_progress: Callable[[int], None] = _ignore,
) -> int:
    """Write the striped or ordinary file `path` to the local file `target`, whole or not at all.

    A device, such as /dev/null, is written in place. `on_progress` is called with the bytes of
    each step.

    Returns: the size in bytes.

    Raises: NotFoundError, CorruptError, NoSpaceError, UnavailableError (also when `path` is
        replaced meanwhile and its old content gone), DeadlineError, InvalidInputError if `target`
        is a pipe or socket, ...
    """
    opened = storage.reader.open(storage.tree.stored.view(path))
    try:
        if _is_device(target):
            _write_local(storage, opened, target, os.O_WRONLY, on_progress)
            return opened.view.size_bytes
        temporary = target.with_name(f".bootseer-{secrets.token_hex(8)}.tmp")
        try:
            _write_local(storage, opened, temporary, _NEW_FILE, on_progress)
            temporary.replace(target)
            sync_directory(str(target.parent))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return opened.view.size_bytes
    except OSError as error:
        raise from_oserror(error, f"write {target}") from error
    finally:
        storage.reader.close(opened)


def _is_device(target: Path) -> bool:
    """Return whether `target` is a device.

    Raises: InvalidInputError if it is a pipe or socket, which takes bytes in order only.
    """
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise InvalidInputError(f"{target} is a pipe or socket, and a copy is not written in order")
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _write_local(
    storage: StripedStorage,
    opened: OpenFile,
    target: Path,
    flags: int,
    on_progress: Callable[[int], None],
) -> None:
    """Write the content of an open file to `target`, in any order. Raises: as `copy_out`."""
    fd = os.open(target, flags | os.O_CLOEXEC, 0o600)

    def write(offset: int, piece: memoryview) -> None:
        while len(piece):
            written = os.pwrite(fd, piece, offset)
            offset, piece = offset + written, piece[written:]

    try:
        storage.reader.copy(opened, write, on_progress)
        if flags & os.O_CREAT:
            os.fsync(fd)
    finally:
        os.close(fd)


def copy_across(
    source: StripedStorage,
    path: str,
    target: StripedStorage,
    target_path: str,
    *,
    on_progress: Callable[[int], None] = _ignore,
) -> int:
    """Store the file `path` of one storage in another or the same one, whole or not at all.

    The target's settings say how it is striped. Returns the size in bytes. Raises as `copy_in` and
    `copy_out` do.
    """
    opened = source.reader.open(source.tree.stored.view(path))
    try:
        writer = target.writer(target_path)
        try:
            copy_opened(source, opened, writer, on_progress)
            return writer.size_bytes
        finally:
            writer.close(_CLOSE_WAIT_S)
    finally:
        source.reader.close(opened)


def copy_opened(
    source: StripedStorage,
    opened: OpenFile,
    writer: FileWriter,
    on_progress: Callable[[int], None],
) -> None:
    """Write all bytes of an open file of `source` to `writer`, and publish the new file."""

    def write(piece: memoryview) -> None:
        writer.append(piece)
        on_progress(len(piece))

    read_pieces(source, opened, 0, opened.view.size_bytes, write)
    writer.publish()


def read_into(storage: StripedStorage, path: str, buffer: Any, offset: int = 0) -> int:
    """Fill `buffer` with verified bytes of `path` from `offset` on, from all parts at once.

    `buffer` is a writable, contiguous buffer of any shape (bytearray, NumPy array, CPU tensor as
    NumPy, pinned memory, mmap). It is filled as bytes, without another copy. After an error its
    content is undefined.

    Returns: The number of bytes, less than the size of `buffer` only at the end of the file.

    Raises: InvalidInputError, NotFoundError, CorruptError, UnavailableError, DeadlineError.
    """
    target = memoryview(buffer)
    if target.readonly or not target.c_contiguous or offset < 0:
        raise InvalidInputError(
            "read_into needs a writable, contiguous buffer and an offset that is not negative"
        )
    if not target.nbytes:
        return 0
    opened = storage.reader.open(storage.tree.stored.view(path))
    try:
        return storage.reader.read_into(opened, offset, target.cast("B"))
    finally:
        storage.reader.close(opened)


def read_opened(storage: StripedStorage, opened: OpenFile, offset: int, target: memoryview) -> None:
    """Fill `target` with bytes of an open file from `offset` on; the file has that many bytes.

    Large reads go straight into `target`. Small ones may be steps of a sequential reader, so they
    pass through the window, which reads ahead.
    """
    if len(target) >= _DIRECT_BYTES:
        storage.reader.read_into(opened, offset, target)
        return

    def copy(piece: memoryview) -> None:
        nonlocal target
        target[: len(piece)] = piece
        target = target[len(piece) :]

    read_pieces(storage, opened, offset, offset + len(target), copy)


def read_pieces(
    storage: StripedStorage,
    opened: OpenFile,
    start: int,
    end: int,
    consume: Callable[[memoryview], None],
) -> None:
    """Pass the existing bytes `[start, end)` of an open file to `consume`, piece by piece.

    A piece is released before the next ones are read, because they may need its memory.
    """
    step_bytes = min(_STEP_BYTES, storage.memory.limit_bytes // 4)
    position = start
    while position < end:
        pieces = storage.reader.read(opened, position, min(step_bytes, end - position))
        while pieces:
            position += len(pieces[0])
            consume(pieces.pop(0))


def is_stored_as(view: FileView, settings: StripeSettings) -> bool:
    """Return whether a file already has the form that the settings ask for. Pure."""
    if settings.layout == "plain" or view.size_bytes <= settings.stripe_unit_bytes:
        return view.layout is None
    return view.layout is not None and _is_striped_as(view.layout, settings)


def _is_striped_as(layout: Layout, settings: StripeSettings) -> bool:
    """Return whether a file was written by one save with these settings.

    It then has several segments only if it is too large for one, and they are of one size.
    """
    (*full, last) = layout.segments
    unit = settings.stripe_unit_bytes
    return all(
        segment.stripe_unit_bytes == unit
        and len(segment.parts) == min(settings.stripe_count, -(-segment.size_bytes // unit))
        for segment in layout.segments
    ) and all(segment.size_bytes == full[0].size_bytes >= last.size_bytes for segment in full)


def convert_file(
    storage: StripedStorage,
    path: str,
    settings: StripeSettings,
    on_progress: Callable[[int], None] = _ignore,
) -> bool:
    """Store the file `path` in the form of `settings`. Return False if it has that form already.

    Open readers are not disturbed. Raises: BusyError if another writer replaced the file meanwhile
    (the other writer's content stays), CorruptError if the file cannot be read, and the storage's
    errors.
    """
    view = storage.tree.stored.view(path)
    if is_stored_as(view, settings):
        return False
    exact_settings = replace(settings, is_exact=True)
    opened = storage.reader.open(view)
    try:
        writer = storage.writer(path, expected=view.identity, settings=exact_settings)
        try:
            copy_opened(storage, opened, writer, on_progress)
        finally:
            writer.close()
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise BusyError(
                f"{path} was replaced while it was converted; the new one stays as it is"
            ) from error
        raise
    finally:
        storage.reader.close(opened)
    return True


def _read_local(file: RawIOBase, source: Path) -> bytes | None:
    try:
        return file.read(_STEP_BYTES)
    except OSError as error:
        raise from_oserror(error, f"read {source}") from error
