"""Inventory of a store: every object, and how it hangs together with others.

Edge: reads the store, changes nothing. An inventory is immutable.
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
"""The largest difference between clocks of a cluster that are right."""

_AT_ONCE = 8
"""Records that are read at a time: each is a few requests to a distant store, and there may be
thousands."""

_Record = TypeVar("_Record")


class Object(Struct, frozen=True):
    """An object of the store: size, time, format and links."""

    size_bytes: int
    modified_ns: int
    format: ObjectFormat | None = None
    """None: one that nobody here knows, which is no garbage."""
    links: Links = Links()


class Inventory(Struct, frozen=True):
    """Everything in a store, by key."""

    objects: Mapping[str, Object]
    formats: Sequence[ObjectFormat]
    """Each before those that it may name."""
    now_ns: int = 0
    """When the store was listed, by which ages are told: by the storage's clock, or by this node's
    where that is earlier. A clock that is ahead, whichever it is, must not make anything old."""
    is_clock_wrong: bool = False
    """Whether the two clocks differ by more than a cluster's should."""

    def entries(self) -> Iterator[tuple[str, RecordEntry]]:
        """Yield the records that users name, with their keys."""
        for key, one in self.objects.items():
            if one.links.entry is not None:
                yield key, one.links.entry

    def is_content(self, key: str) -> bool:
        """Tell whether several records may name the object at `key`."""
        of = self.objects[key].format
        return of is not None and of.is_content

    def labels(self) -> Mapping[str, Sequence[str]]:
        """Return what users call records, by key."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for one in self.objects.values():
            if one.links.label:
                for key in one.links.hangs_on:
                    found[key].append(one.links.label)
        return found

    def last_used_ns(self, trees: Sequence[str]) -> int:
        """Return when one of these trees was last noted as used; 0: never."""
        notes = (self.objects.get(use_key(tree)) for tree in trees)
        return max((note.modified_ns for note in notes if note is not None), default=0)


def take_inventory(store: Store, formats: Sequence[ObjectFormat]) -> Inventory:
    """List the store, then read the records in it.

    Raises: CorruptError, UnknownFormatError for a record that cannot be read: what it needs is not
    known then, so nothing may be collected; UnavailableError, DeadlineError.
    """
    own_ns, stored_ns = _read_clocks(store)
    infos = {info.path: info for info in store.list()}
    newest_ns = max((info.modified_ns for info in infos.values()), default=0)
    now_ns, is_clock_wrong = _judge_clocks(store, own_ns, stored_ns, newest_ns)
    known = {key: next((one for one in formats if one.fits(key)), None) for key in infos}
    read = look_at_each(
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
        # Where the storage does not tell an object's age, it may have been written just now.
        objects[key] = Object(info.size_bytes, info.modified_ns or now_ns, one, links)
    return Inventory(objects, formats, now_ns, is_clock_wrong)


def _read(store: Store, key: str, of: ObjectFormat | None) -> Links:
    assert of is not None
    assert of.read is not None
    try:
        return of.read(store, key)
    except (CorruptError, UnknownFormatError) as error:
        raise type(error)(
            f"nothing is collected: what {key} needs cannot be told, since {error}; use a newer "
            "release, or delete that record if it is damaged"
        ) from error


def look_at_each(
    store: Store, keys: Iterable[str], look: Callable[[Store, str], _Record]
) -> dict[str, _Record]:
    """Return what `look` says of each object that is there, by its key; `_AT_ONCE` at a time.
    Raises: as `look`, but for NotFoundError."""

    def look_at(key: str, _: str) -> _Record | None:
        try:
            return look(store, key)
        except NotFoundError:
            return None  # deleted since it was listed

    found = map_in_threads(
        {key: key for key in keys},
        look_at,
        StoppableProgress(None),
        thread_count=_AT_ONCE,
        thread_name="inventory",
        size_of=lambda _: None,
    )
    return {key: record for key, record in found.items() if record is not None}


def _read_clocks(store: Store) -> tuple[int, int]:
    """Return the time by this node's clock and by the storage's; 0 where that tells no time."""
    stored_ns = 0
    with contextlib.suppress(PermissionDeniedError, NoSpaceError, NotFoundError):
        # A store that is not there is not made by a look at it.
        if any(True for _ in store.backend.list("")):
            stored_ns = store.time_ns()
    return time.time_ns(), stored_ns


def _judge_clocks(store: Store, own_ns: int, stored_ns: int, newest_ns: int) -> tuple[int, bool]:
    """The time that ages are told by, and whether a clock is wrong. `newest_ns` is the latest time
    of an object."""
    if not stored_ns:
        # Of the storage's clock it is known only that it was there already.
        return min(own_ns, newest_ns) if newest_ns else own_ns, False
    is_wrong = abs(own_ns - stored_ns) > _SKEW_NS
    if is_wrong:
        _log.warning(
            "the clocks of this node and of %s differ by %.0f s: ages are told by the earlier one, "
            "so that nothing counts as old by mistake; set the clock that is wrong",
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
