"""Links from the records of images and bundles to other objects of a store, for `bootseer gc`.

The format is described in docs/format/store.md, "Use and garbage". Functions and constants only.
"""

from urllib.parse import unquote

from bootseer.blob.keys import blob_key, index_key
from bootseer.errors import NotFoundError
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.similar import name_of, read_similar
from bootseer.prefetch.index.catalogue import layer_key
from bootseer.prefetch.index.chains import chain_ids, chain_key, read_chain
from bootseer.prefetch.index.records import IMAGE_FORM, LAYER_FORM
from bootseer.store import Store
from bootseer.store.objects.records import ONE_DOCUMENT, Links, ObjectFormat, RecordEntry


def _links_of_image(store: Store, key: str) -> Links:
    image = IMAGE_FORM.read(store, key)
    diff_ids = image.config.diff_ids
    return Links(
        (
            index_key(image.index_digest),
            *(blob_key(layer.blob_digest) for layer in image.layers),
            *(layer_key(layer.digest) for layer in image.layers),
            *map(layer_key, diff_ids),
            *map(chain_key, chain_ids(diff_ids)),
            hot_store.name_folder(name_of(image.reference)),
        ),
        entry=RecordEntry("image", image.reference, image.created_ns),
    )


def _links_of_chain(store: Store, key: str) -> Links:
    chain = read_chain(store, unquote(key.removeprefix("chains/").removesuffix(".json")))
    if chain is None:
        raise NotFoundError(key)
    # The merged tree of the layers, by which their blobs are read.
    tree = (index_key(chain.index_digest),) if chain.index_digest else ()
    return Links((*map(layer_key, chain.diff_ids), *tree))


def _links_of_layer(store: Store, key: str) -> Links:
    layer = LAYER_FORM.read(store, key)
    return Links((index_key(layer.index_digest), blob_key(layer.blob_digest)))


def _links_of_similar(store: Store, key: str) -> Links:
    # The next build of an image borrows the bundle of an earlier one. That takes the earlier tree,
    # but not its blobs.
    trees = tuple(index_key(one.index_digest) for one in read_similar(store, key))
    return Links(lends=trees, hangs_on=trees)


def _links_of_pointer(store: Store, key: str) -> Links:
    index, _, workload = key.removeprefix("hot/").partition("/")
    pointer = hot_store.read_pointer(store, f"sha256:{index}", workload.removesuffix(".json"))
    if pointer is None:
        raise NotFoundError(key)
    tree = index_key(pointer.index_digest)
    bundle = hot_store.header_key(pointer.bundle_digest).removesuffix("header")
    return Links((tree, hot_store.hotset_key(pointer.hotset_digest), bundle), hangs_on=(tree,))


def _links_of_trace(key: str) -> Links:
    return Links(hangs_on=(index_key(f"sha256:{key.split('/')[1]}"),))


def _links_of_bundle(key: str) -> Links:
    # The parts are published before the header, and that may take long.
    return Links((key.rpartition("/")[0] + "/",))


FORMATS = (
    ObjectFormat("images/", _links_of_image, pattern=ONE_DOCUMENT),
    ObjectFormat("chains/", _links_of_chain, pattern=ONE_DOCUMENT),
    ObjectFormat("layers/", _links_of_layer, pattern=ONE_DOCUMENT),
    ObjectFormat("hot/names/", _links_of_similar),
    ObjectFormat("hot/streams/", _links_of_similar),
    ObjectFormat("hot/", _links_of_pointer),
    ObjectFormat("traces/", links_of=_links_of_trace),
)
"""Formats of records with links."""
CONTENT = (
    # Headers name the parts, so that they are removed first.
    ObjectFormat("bundles/", links_of=_links_of_bundle, suffix="/header", is_content=True),
    ObjectFormat("bundles/", links_of=_links_of_bundle, is_content=True),
    ObjectFormat("hotsets/", is_content=True),
)
"""Formats of objects that pointers name."""
