"""Conversion of stored files to another form: striped, plain, or striped otherwise.

The new content is complete and durable before it replaces the old content in one step, and only if
the old content is still there. If the process is killed, the file stays as it was, and fsck finds
the bytes written so far.
"""

import errno
from collections.abc import Callable

from msgspec.structs import replace

from bootseer.errors import BusyError
from bootseer.fuse.striped.layout import Layout
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.tools.copy import copy_opened
from bootseer.fuse.striped.view import FileView


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
    on_progress: Callable[[int], None] = lambda count: None,
) -> bool:
    """Store the file `path` in the form of `settings`. Return False if it has that form already.

    Open readers are not disturbed. Raises: BusyError if another writer replaced the file meanwhile
    (the other writer's content stays), CorruptError if the file cannot be read, and the storage's
    errors.
    """
    view = storage.tree.stored.view(path)
    if is_stored_as(view, settings):
        return False
    exactly = replace(settings, is_exact=True)
    opened = storage.reader.open(view)
    try:
        writer = storage.writer(path, expected=view.identity, settings=exactly)
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
