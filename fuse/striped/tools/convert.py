"""Stores a file anew in another form: striped, plain, or striped otherwise.

Owns the order that makes it safe: the new content is complete and durable before it takes the old
one's place, in one step, and only while the old one is still there. Killed at any moment, the file
is as it was, and what was written is garbage for fsck.
"""

import errno
from collections.abc import Callable

from bootseer.errors import BusyError
from bootseer.fuse.striped.layout import Layout
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.fuse.striped.tools.copy import read_pieces
from bootseer.fuse.striped.view import FileView
from bootseer.store.backend import Backend


class _Exactly(StripeSettings, frozen=True):
    """Settings that neither a directory's rule nor the memory at hand changes: the user has said
    what it shall be."""

    @property
    def is_asked_for(self) -> bool:
        return True

    def layout_in(self, backend: Backend, directory: str) -> LayoutKind:
        return self.layout


def is_stored_as(view: FileView, settings: StripeSettings) -> bool:
    """Whether nothing would change. Pure."""
    if settings.layout == "plain" or view.size_bytes <= settings.stripe_unit_bytes:
        return view.layout is None
    return view.layout is not None and _is_striped_as(view.layout, settings)


def _is_striped_as(layout: Layout, settings: StripeSettings) -> bool:
    """Segments after the first one are of files too large for one; what was appended is not."""
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
    """Store the file `path` as `settings` say; returns False where it is so already.

    A process that reads it reads on. Raises: BusyError where another writer replaced it meanwhile
    (theirs stays), CorruptError where it cannot be read, and what the storage fails with.
    """
    view = storage.tree.stored.view(path)
    if is_stored_as(view, settings):
        return False
    exactly = _Exactly(
        settings.stripe_unit_bytes, settings.stripe_count, settings.deadline_s, settings.layout
    )
    opened = storage.reader.open(view)
    try:
        writer = storage.writer(path, expected=view.identity, settings=exactly)
        try:

            def write(piece: memoryview) -> None:
                writer.append(piece)
                on_progress(len(piece))

            read_pieces(storage, opened, 0, view.size_bytes, write)
            writer.publish()
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise BusyError(
                    f"{path} was replaced while it was converted; the new one stays as it is"
                ) from error
            raise
        finally:
            writer.close()
    finally:
        storage.reader.close(opened)
    return True
