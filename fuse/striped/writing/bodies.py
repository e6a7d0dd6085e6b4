"""Which form a file that is written has: the choice for a new one, and that of one that exists.

Owns no state.
"""

from bootseer.fuse.striped.layout import HEADER_BYTES, MAGIC
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.fuse.striped.view import FileView
from bootseer.fuse.striped.writing.body import Body
from bootseer.fuse.striped.writing.plain_body import PlainBody
from bootseer.fuse.striped.writing.resources import WriterResources
from bootseer.fuse.striped.writing.striped_body import StripedBody
from bootseer.fuse.striped.writing.tail import Tail


def begin_body(shared: WriterResources, path: str, settings: StripeSettings, start: Tail) -> Body:
    """The form of a new large file that begins with `start`."""
    # Whatever looks like a layout must not be stored as an ordinary file.
    if not looks_like_layout(start):
        directory = path.rpartition("/")[0]
        if settings.layout_in(shared.backend, directory) == "plain":
            return PlainBody(shared, path, settings)
    return StripedBody(shared, path, settings)


def continue_body(
    shared: WriterResources, path: str, settings: StripeSettings, base: FileView
) -> tuple[Body | None, Tail]:
    """What is kept of an existing file that is appended to, and its last bytes where they are few
    enough to be written again.

    Raises UnsupportedError for a file that cannot be appended to.
    """
    unit_bytes = settings.stripe_unit_bytes
    body: Body | None = None
    start = base.size_bytes
    if base.layout is not None:
        kept = list(base.layout.segments)
        if kept[-1].size_bytes < unit_bytes:
            start -= kept.pop().size_bytes
        if kept:
            body = StripedBody(shared, path, settings, tuple(kept))
    elif base.size_bytes > unit_bytes:
        body = PlainBody(shared, path, settings, base)
    else:
        start = 0
    if start == base.size_bytes:
        return body, Tail()
    reader = shared.tree.reader
    file = reader.open(base)
    try:
        return body, Tail(reader.read_bytes(file, start, base.size_bytes - start))
    finally:
        reader.close(file)


def looks_like_layout(start: Tail) -> bool:
    """Whether a file that begins so could be taken for a layout."""
    return start.join()[:HEADER_BYTES].startswith(MAGIC)
