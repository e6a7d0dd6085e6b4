"""Copy files into and out of a striped tree without mounting it.

Owns nothing but the two loops. Functions may be called from any thread.
"""

import os
from collections.abc import Callable
from pathlib import Path

from bootseer.config import Settings
from bootseer.errors import BootseerError, from_oserror
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.writer import StripeSettings
from bootseer.store import open_backend

_STEP_BYTES = 4 * 2**20


def _ignore(count: int) -> None:
    pass


def open_storage(
    settings: Settings,
    url: str,
    *,
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
    stripe_count: int = DEFAULT_STRIPE_COUNT,
) -> StripedStorage:
    """The striped tree at `url`, to be closed by the caller. Raises: InvalidInputError."""
    stripes = StripeSettings(stripe_unit_bytes, stripe_count, settings.deadline_s)
    return StripedStorage(
        open_backend(url, deadline_s=settings.deadline_s),
        stripes,
        memory_bytes=settings.memory_bytes,
    )


def copy_in(
    storage: StripedStorage,
    source: Path,
    path: str,
    *,
    on_progress: Callable[[int], None] = _ignore,
) -> int:
    """Store the local file `source` as `path`, striped; it appears whole or not at all.

    `on_progress` is told the bytes of each step. Returns the size. Raises: BootseerError.
    """
    try:
        file = source.open("rb", buffering=0)
    except OSError as error:
        raise from_oserror(error, f"read {source}") from error
    writer = storage.writer(path)
    try:
        with file:
            while True:
                try:
                    data = file.read(_STEP_BYTES)
                except OSError as error:
                    raise from_oserror(error, f"read {source}") from error
                if not data:
                    break
                writer.append(data)
                on_progress(len(data))
        writer.publish()
        return writer.size_bytes
    finally:
        writer.close()


def copy_out(
    storage: StripedStorage,
    path: str,
    target: Path,
    *,
    on_progress: Callable[[int], None] = _ignore,
) -> int:
    """Write the striped or ordinary file `path` to the local file `target`, whole or not at all.

    Returns the size. Raises: BootseerError.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    opened = storage.reader.open(storage.tree.stored.view(path))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                position = 0
                while pieces := storage.reader.read(opened, position, _STEP_BYTES):
                    for piece in pieces:
                        while len(piece):
                            written = file.write(piece)
                            piece = piece[written:]
                            position += written
                            on_progress(written)
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return position
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, f"write {target}") from error
    finally:
        storage.reader.close(opened)
