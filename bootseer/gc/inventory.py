"""Inventory of a store: every object, and its references to other objects.

Reads the store and changes nothing. An inventory is immutable.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from bootseer.base.parallel import StoppableProgress, map_in_threads
from bootseer.errors import (
    CorruptError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnknownFormatError,
)
from bootseer.store import Store
from bootseer.store.objects.records import Links, ObjectFormat, RecordEntry
from bootseer.store.objects.uses import use_key

_log = logging.getLogger(__name__)

_SKEW_NS = 60 * 10**9
"""Largest difference between correct clocks in a cluster."""

_THREADS = 8
"""Records that are read at once: each takes a few requests to a distant store, and there may be
thousands."""

_Record = TypeVar("_Record")


class StoredObject(Struct, frozen=True):
    """StoredObject of the store: size, time, format and links."""

    size_bytes: int
    modified_ns: int
    format: ObjectFormat | None = None
    """None for an object of an unknown format, which is never deleted."""
    links: Links = Links()


class Inventory(Struct, frozen=True):
    """Everything in a store, by key."""

    objects: Mapping[str, StoredObject]
    formats: Sequence[ObjectFormat]
    """Formats; each comes before the formats that it may refer to."""
    now_ns: int = 0
    """Time of the listing, from which ages are computed: the earlier one of the storage's clock and
    this node's, so that a clock that is ahead makes no object seem old."""
    is_clock_wrong: bool = False
    """Whether the two clocks differ by more than clocks of a cluster should."""

    def entries(self) -> Iterator[tuple[str, RecordEntry]]:
        """Yield the records that users name, with their keys."""
        for key, one in self.objects.items():
            if one.links.entry is not None:
                yield key, one.links.entry

    def is_content(self, key: str) -> bool:
        """Return whether several records may refer to the object at `key`."""
        found = self.objects[key].format
        return found is not None and found.is_content

    def labels(self) -> Mapping[str, Sequence[str]]:
        """Return the users' names of records, by key."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for one in self.objects.values():
            if one.links.label:
                for key in one.links.hangs_on:
                    found[key].append(one.links.label)
        return found

    def last_used_ns(self, trees: Sequence[str]) -> int:
        """Return the last time at which one of these trees was noted as used; 0 for never."""
        notes = (self.objects.get(use_key(tree)) for tree in trees)
        return max((note.modified_ns for note in notes if note is not None), default=0)


def take_inventory(store: Store, formats: Sequence[ObjectFormat]) -> Inventory:
    """List the store, then read the records in it.

    Raises: CorruptError, UnknownFormatError for a record that cannot be read: nothing may be
    collected then, because the objects that it needs are unknown; UnavailableError, DeadlineError.
    """
    own_ns, stored_ns = _read_clocks(store)
    infos = {info.path: info for info in store.list()}
    newest_ns = max((info.modified_ns for info in infos.values()), default=0)
    now_ns, is_clock_wrong = _judge_clocks(store, own_ns, stored_ns, newest_ns)
    known = {key: next((one for one in formats if one.fits(key)), None) for key in infos}
    read = read_each(
        store,
        (key for key, one in known.items() if one is not None and one.is_read(key)),
        lambda store, key: _read(store, key, known[key]),
    )
    objects = {}
    for key, one in known.items():
        links = Links()
        if one is not None:
            links = read.get(key, links) if one.is_read(key) else one.links_of(key)
        info = infos[key]
        # An object for which the storage tells no time may have been written just now.
        objects[key] = StoredObject(info.size_bytes, info.modified_ns or now_ns, one, links)
    return Inventory(objects, formats, now_ns, is_clock_wrong)


def _read(store: Store, key: str, form: ObjectFormat | None) -> Links:
    assert form is not None
    assert form.read is not None
    try:
        return form.read(store, key)
    except (CorruptError, UnknownFormatError) as error:
        raise type(error)(
            f"nothing is collected: the objects that {key} needs are unknown, since {error}; use a "
            "newer release, or delete that record if it is damaged"
        ) from error


def read_each(
    store: Store, keys: Iterable[str], read: Callable[[Store, str], _Record]
) -> dict[str, _Record]:
    """Call `read` for each object, several at once; return the results by key.

    Objects that were deleted since they were listed are left out. Raises: as `read`, except
    NotFoundError.
    """

    def read_existing(key: str, _: str) -> _Record | None:
        try:
            return read(store, key)
        except NotFoundError:
            return None

    found = map_in_threads(
        {key: key for key in keys},
        read_existing,
        StoppableProgress(None),
        thread_count=_THREADS,
        thread_name="inventory",
        size_of=lambda _: None,
    )
    return {key: record for key, record in found.items() if record is not None}


def _read_clocks(store: Store) -> tuple[int, int]:
    """Return the time of this node's clock and of the storage's; 0 if the storage tells none."""
    stored_ns = 0
    with contextlib.suppress(PermissionDeniedError, NoSpaceError, NotFoundError):
        # Asking for the time writes an object, and would make a store that does not exist.
        if any(True for _ in store.backend.list("")):
            stored_ns = store.time_ns()
    return time.time_ns(), stored_ns


def _judge_clocks(store: Store, own_ns: int, stored_ns: int, newest_ns: int) -> tuple[int, bool]:
    """Return the time from which ages are computed, and whether a clock is wrong.

    `newest_ns`: the latest time of an object.
    """
    if not stored_ns:
        # The storage's clock has passed the time of the newest object.
        return min(own_ns, newest_ns) if newest_ns else own_ns, False
    is_wrong = abs(own_ns - stored_ns) > _SKEW_NS
    if is_wrong:
        _log.warning(
            "the clocks of this node and of %s differ by %.0f s: ages are computed from the "
            "earlier one, so that nothing counts as old by mistake; set the clock that is wrong",
            store.url,
            abs(own_ns - stored_ns) / 1e9,
        )
    if newest_ns > stored_ns + _SKEW_NS:
        _log.warning(
            "objects in %s carry times that are still to come, the latest in %.0f s: a clock was "
            "ahead when they were written, and they count as young until then",
            store.url,
            (newest_ns - stored_ns) / 1e9,
        )
    return min(own_ns, stored_ns), is_wrong
