"""What a store holds: every object, and every record that names others.

Edge: reads the store, changes nothing. An inventory is immutable.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from urllib.parse import unquote

from msgspec import Struct

from bootseer.base.parallel import Stoppable, each_at_once
from bootseer.errors import (
    CorruptError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnknownFormatError,
)
from bootseer.prefetch.bundle import bundle_reuse, hot_store
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.index.chains import Chain, read_chain
from bootseer.prefetch.index.records import (
    IMAGE_FORM,
    LAYER_FORM,
    ImageRecord,
    LayerRecord,
)
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.store import Store
from bootseer.store.objects.uses import FOLDER as USES
from bootseer.store.objects.uses import Use, read_use

_log = logging.getLogger(__name__)

_SKEW_NS = 60 * 10**9
"""The largest difference between clocks of a cluster that are right."""

_AT_ONCE = 8
"""Records that are read at a time: each is a few requests to a distant store, and there may be
thousands."""

_Record = TypeVar("_Record")


class Object(Struct, frozen=True):
    """One object of the store."""

    size_bytes: int
    modified_ns: int


class Inventory(Struct, frozen=True):
    """Everything in a store, by key."""

    objects: Mapping[str, Object]
    snapshots: Mapping[str, Manifest]
    names: Mapping[str, str]
    """The key of a snapshot's name -> fingerprint."""
    images: Mapping[str, ImageRecord]
    layers: Mapping[str, LayerRecord]
    chains: Mapping[str, Chain]
    pointers: Mapping[str, HotPointer]
    similar_images: Mapping[str, tuple[str, ...]]
    """The key of a record of images with bundles -> digests of their indexes."""
    uses: Mapping[str, Use]
    now_ns: int = 0
    """When the store was listed, by which ages are told: by the storage's clock, or by this node's
    where that is earlier. A clock that is ahead, whichever it is, must not make anything old."""
    is_clock_wrong: bool = False
    """Whether the two clocks differ by more than a cluster's should."""


def take_inventory(store: Store) -> Inventory:
    """List the store, then read the records in it.

    Raises: CorruptError, UnknownFormatError for a record that cannot be read: what it needs is not
    known then, so nothing may be collected; UnavailableError, DeadlineError.
    """
    own_ns, stored_ns = _read_clocks(store)
    infos = list(store.list())
    newest_ns = max((info.modified_ns for info in infos), default=0)
    now_ns, is_clock_wrong = _judge_clocks(store, own_ns, stored_ns, newest_ns)
    # Where the storage does not tell an object's age, it may have been written just now.
    objects = {info.path: Object(info.size_bytes, info.modified_ns or now_ns) for info in infos}

    def read_all(
        keys: Callable[[str], bool], read: Callable[[Store, str], _Record]
    ) -> dict[str, _Record]:
        def read_one(store: Store, key: str) -> _Record:
            try:
                return read(store, key)
            except (CorruptError, UnknownFormatError) as error:
                raise type(error)(
                    f"nothing is collected: what {key} needs cannot be told, since {error}; use a "
                    "newer release, or delete that record if it is damaged"
                ) from error

        return look_at_each(store, filter(keys, objects), read_one)

    return Inventory(
        objects,
        snapshots=read_all(lambda key: _is_json(key, "snapshots/"), _read_manifest),
        names=read_all(lambda key: _is_json(key, "snapshots/names/"), catalogue.read_pointer),
        images=read_all(lambda key: _is_json(key, "images/"), _read_image),
        layers=read_all(lambda key: _is_json(key, "layers/"), _read_layer),
        chains=read_all(lambda key: _is_json(key, "chains/"), _read_chain),
        pointers=read_all(_is_pointer, _read_pointer),
        similar_images=read_all(
            lambda key: key.startswith(("hot/names/", "hot/streams/")), _read_similar
        ),
        uses=read_all(lambda key: key.startswith(USES), read_use),
        now_ns=now_ns,
        is_clock_wrong=is_clock_wrong,
    )


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

    found = each_at_once(
        {key: key for key in keys},
        look_at,
        Stoppable(None),
        thread_count=_AT_ONCE,
        thread_name="inventory",
        size_of=lambda _: None,
    )
    return {key: record for key, record in found.items() if record is not None}


def _read_clocks(store: Store) -> tuple[int, int]:
    """What this node's clock says, and the storage's; 0 where that tells no time."""
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


def _is_json(key: str, folder: str) -> bool:
    """Whether a record lies directly in `folder`."""
    return key.startswith(folder) and key.endswith(".json") and "/" not in key[len(folder) :]


def _is_pointer(key: str) -> bool:
    return key.startswith("hot/") and not key.startswith(("hot/names/", "hot/streams/"))


def _read_manifest(store: Store, key: str) -> Manifest:
    fingerprint = key.partition("/")[2].removesuffix(".json")
    manifest = catalogue.load(store, fingerprint)
    if manifest is None:
        raise NotFoundError(key)
    return manifest


def _read_image(store: Store, key: str) -> ImageRecord:
    return IMAGE_FORM.read(store, key)


def _read_layer(store: Store, key: str) -> LayerRecord:
    return LAYER_FORM.read(store, key)


def _read_chain(store: Store, key: str) -> Chain:
    chain = read_chain(store, unquote(key.removeprefix("chains/").removesuffix(".json")))
    if chain is None:
        raise NotFoundError(key)
    return chain


def _read_pointer(store: Store, key: str) -> HotPointer:
    index, _, workload = key.removeprefix("hot/").partition("/")
    pointer = hot_store.read_pointer(store, f"sha256:{index}", workload.removesuffix(".json"))
    if pointer is None:
        raise NotFoundError(key)
    return pointer


def _read_similar(store: Store, key: str) -> tuple[str, ...]:
    return tuple(similar.index_digest for similar in bundle_reuse.read_similar(store, key))
