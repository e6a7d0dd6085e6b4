"""Images that were indexed into a store by the product, and the objects in the store."""

import json
import stat
from pathlib import Path
from typing import Any

from bootseer.blob.keys import blob_key
from bootseer.blob.read import BlobReader
from bootseer.blob.tree import Tree
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.sources import open_source
from bootseer.store import Store


def index(source: Path | str, store: Store, tmp_path: Path, **options: object) -> ImageRecord:
    """Index `source` as the command does."""
    with open_source(str(source), tmp_path / "work") as opened:
        return index_image(opened, store, tmp_path / "work", **options)  # type: ignore[arg-type]


def reader_of(tree: Tree, store: Store) -> BlobReader:
    """Return a reader of the tree's files that reads from the store."""

    def read(blob: int, offset: int, length: int) -> bytes:
        return store.read(blob_key(tree.blobs[blob].digest), offset, length)

    return BlobReader(tree, read)


def contents(tree: Tree, store: Store) -> dict[str, bytes]:
    """Return the contents of the tree's regular files, by path."""
    reader = reader_of(tree, store)
    return {
        path.decode(): reader.read(number, 0, tree.inode(number).size_bytes)
        for path, number in tree.walk()
        if stat.S_ISREG(tree.mode(number))
    }


def keys(store: Store) -> list[str]:
    """Return the keys of all objects in the store."""
    return [info.path for info in store.list()]


def unsigned(record: bytes) -> dict[str, Any]:
    """Return a record without its checksum, to be changed by a test."""
    document: dict[str, Any] = json.loads(record)
    del document["checksum"]
    return document
