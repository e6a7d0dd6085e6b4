"""What a store holds: every object, and every record that names others.

Edge: reads the store, changes nothing. An inventory is immutable.
"""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import unquote

from msgspec import Struct

from bootseer.errors import CorruptError, NotFoundError, UnknownFormatError
from bootseer.prefetch import hot_store, relatives
from bootseer.prefetch.chains import Chain, read_chain
from bootseer.prefetch.hot_store import HotPointer
from bootseer.prefetch.records import (
    RECORD_BYTES_MAX,
    ImageRecord,
    LayerRecord,
    decode_image,
    decode_layer,
)
from bootseer.snapshots import catalogue
from bootseer.snapshots.manifest import Manifest
from bootseer.store import Store
from bootseer.store.uses import FOLDER as USES
from bootseer.store.uses import Use, read_use

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
    relatives: Mapping[str, tuple[str, ...]]
    """The key of a record of images with bundles -> digests of their indexes."""
    uses: Mapping[str, Use]


def take_inventory(store: Store) -> Inventory:
    """List the store, then read the records in it.

    Raises: CorruptError, UnknownFormatError for a record that cannot be read: what it needs is not
    known then, so nothing may be collected; UnavailableError, DeadlineError.
    """
    # Where the storage does not tell an object's age, it may have been written just now.
    now_ns = time.time_ns()
    objects = {
        info.path: Object(info.size_bytes, info.modified_ns or now_ns) for info in store.list()
    }

    def read_all(
        keys: Callable[[str], bool], read: Callable[[Store, str], _Record]
    ) -> dict[str, _Record]:
        found = {}
        for key in filter(keys, objects):
            try:
                found[key] = read(store, key)
            except NotFoundError:
                continue  # deleted since it was listed
            except (CorruptError, UnknownFormatError) as error:
                raise type(error)(
                    f"nothing is collected: what {key} needs cannot be told, since {error}; use a "
                    "newer release, or delete that record if it is damaged"
                ) from error
        return found

    return Inventory(
        objects,
        snapshots=read_all(lambda key: _is_json(key, "snapshots/"), _read_manifest),
        names=read_all(lambda key: _is_json(key, "snapshots/names/"), catalogue.read_pointer),
        images=read_all(lambda key: _is_json(key, "images/"), _read_image),
        layers=read_all(lambda key: _is_json(key, "layers/"), _read_layer),
        chains=read_all(lambda key: _is_json(key, "chains/"), _read_chain),
        pointers=read_all(_is_pointer, _read_pointer),
        relatives=read_all(
            lambda key: key.startswith(("hot/names/", "hot/streams/")), _read_relatives
        ),
        uses=read_all(lambda key: key.startswith(USES), read_use),
    )


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
    return decode_image(store.read(key, 0, RECORD_BYTES_MAX + 1), key)


def _read_layer(store: Store, key: str) -> LayerRecord:
    return decode_layer(store.read(key, 0, RECORD_BYTES_MAX + 1), key)


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


def _read_relatives(store: Store, key: str) -> tuple[str, ...]:
    return tuple(relative.index_digest for relative in relatives.read(store, key))
