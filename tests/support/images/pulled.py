"""A node that pulls images, for tests of pulled images."""

import json
import os
import stat
from pathlib import Path

from bootseer.blob.tree import Tree
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import STREAMS, NodeCache, store_hex
from bootseer.prefetch.images.find import resolve_image
from bootseer.prefetch.index.node_catalogue import FoundImage, vouched_streams
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.settings.config import Settings
from bootseer.store import open_store
from testbed.mounts.image_mounts import settings_at


class PullingNode:
    """Node with caches below `base` that uses the store `store`."""

    def __init__(self, base: Path, store: Path | str) -> None:
        base.mkdir(parents=True, exist_ok=True)
        url = store if isinstance(store, str) else store.as_uri()
        self.settings: Settings = settings_at(base, store_url=url)
        self.said: list[str] = []

    def obtain(self, image: object) -> FoundImage:
        """Return the image that a start would mount; `said` has the messages."""
        self.said = []
        return resolve_image(self.settings, str(image), say=self.said.append)

    def start(self, image: object) -> tuple[FoundImage, dict[str, bytes]]:
        """Obtain the image and read all of it."""
        resolved = self.obtain(image)
        try:
            return resolved, self.contents(resolved)
        finally:
            resolved.release()

    def tree(self, resolved: FoundImage) -> Tree:
        return read_kept_tree(self.settings.cache_dir, resolved.record.index_digest)

    def contents(self, resolved: FoundImage) -> dict[str, bytes]:
        """Return the content of every regular file by path, as the image's server reads it."""
        tree = self.tree(resolved)
        with open_store(self.settings.store_url) as store:
            streams = ImageBytes(
                tree.blobs,
                store.read_into,
                NodeCache(self.settings.cache_dir),
                deadline_s=30,
                vouched=vouched_streams(
                    self.settings,
                    resolved.record.index_digest,
                    tree.blobs,
                    is_local=not resolved.is_published,
                ),
            )
            try:
                return {
                    os.fsdecode(path): _content(tree, number, streams)
                    for path, number in tree.walk()
                    if stat.S_ISREG(tree.mode(number))
                }
            finally:
                streams.close()

    def left_behind(self) -> list[str]:
        """Return the files that a failed pull must not leave."""
        streams = self.settings.cache_dir / STREAMS
        catalogue = self.settings.cache_dir / "catalogue"
        return [
            str(path.relative_to(self.settings.cache_dir))
            for folder in (streams, catalogue)
            for path in folder.rglob("*")
            if path.is_file()
        ]


def note_store(cache_dir: Path, store_url: str) -> None:
    """Make all records of the node's images name this store."""
    for path in (cache_dir / "catalogue").glob("*/*.json"):
        document = json.loads(path.read_bytes())
        if "store" in document:
            path.write_text(json.dumps({**document, "store": store_hex(store_url)}))


def _content(tree: Tree, number: int, streams: ImageBytes) -> bytes:
    inode = tree.inode(number)
    content = bytearray(inode.size_bytes)
    for extent in inode.extents:
        data = streams.read(extent.blob, extent.blob_offset, extent.length)
        content[extent.file_offset : extent.file_offset + extent.length] = data
    return bytes(content)


def objects(store: Path) -> dict[str, bytes]:
    """Return the content of all objects of a store by key, without the times of indexing."""
    with open_store(str(store)) as opened:
        return {
            info.path: b"\n".join(
                line
                for line in opened.read(info.path).split(b"\n")
                if b'"created_ns"' not in line and b'"checksum"' not in line
            )
            for info in opened.list()
        }
