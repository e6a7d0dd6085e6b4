"""A packed directory in a store, without a mount."""

import hashlib
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.blob.keys import blob_key
from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.tree import Tree
from bootseer.prefetch.bundle.file import BundleFile
from bootseer.prefetch.bundle.format import decode_header, plan_frames, write_bundle
from bootseer.prefetch.bundle.hot_store import part_key
from bootseer.prefetch.bundle.replay import BundleReplay
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.store import Store, open_store
from tests.support.ranged import as_reader

INDEX = "sha256:" + "77" * 32
SIZES = {"big": 3_000_000, "small": 700, "middle": 300_000}


@dataclass
class Image:
    """Packed directory in a store, and a reader of the store that counts its reads."""

    tree: Tree
    store: Store
    contents: dict[str, bytes]
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    before_read: Callable[[str], None] = lambda key: None
    change: Callable[[str, bytes], bytes] = lambda key, data: data
    """Function that changes the bytes on their way over the network."""

    def read_object(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append((key, offset, length))
        self.before_read(key)
        return self.change(key, self.store.read(key, offset, length))

    @property
    def read_bytes(self) -> int:
        return sum(length for _, _, length in self.reads)

    def streams(
        self, cache_dir: Path, deadline_s: float = 20.0, *, try_again_s: float = 5.0
    ) -> ImageBytes:
        return ImageBytes(
            self.tree.blobs,
            as_reader(self.read_object),
            NodeCache(cache_dir, try_again_s=try_again_s),
            deadline_s=deadline_s,
            image_key=INDEX,
        )

    def place(self, name: str, offset: int, length: int) -> tuple[int, int, int]:
        number = self.tree.resolve(name.encode())
        assert number is not None
        (extent,) = self.tree.inode(number).extents
        return extent.blob, extent.blob_offset + offset, length

    def publish_bundle(self, ranges: list[tuple[int, int, int]]) -> tuple[str, bytes]:
        """Publish a bundle with these ranges; return its digest and header."""
        lengths = [blob.stream_length for blob in self.tree.blobs]
        parts = [io.BytesIO() for _ in range(2)]
        cache = self.streams(Path(self.store.url.removeprefix("file://")).parent / "build")
        header = write_bundle(
            INDEX,
            plan_frames(ranges, lengths, 16384),
            lambda *piece: bytes(cache.read(*piece)),
            parts,
        )
        cache.close()
        digest = f"sha256:{hashlib.sha256(header).hexdigest()}"
        for number, part in enumerate(parts):
            self.store.publish(part_key(digest, number), part.getvalue())
        self.reads.clear()
        return digest, header

    def replay(
        self, streams: ImageBytes, digest: str, header: bytes, lock: Path | None = None
    ) -> BundleReplay:
        lengths = [blob.stream_length for blob in self.tree.blobs]
        bundle = decode_header(header, INDEX, lengths)
        file = BundleFile(streams.cache, bundle, INDEX, len(lengths))
        replay = BundleReplay(file, digest, streams.streams, streams.fetcher, lock=lock)
        streams.use(file, replay=replay)
        return replay


def stored_image(tmp_path: Path) -> Image:
    """Pack and publish three files of random bytes."""
    root = tmp_path / "root"
    root.mkdir()
    generator = random.Random(7)
    contents = {name: generator.randbytes(size) for name, size in SIZES.items()}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    blob = tmp_path / "blob"
    with blob.open("wb") as sink:
        tree = pack_directory(root, sink)
    store = open_store((tmp_path / "store").as_uri())
    store.publish(blob_key(tree.blobs[0].digest), blob)
    return Image(tree, store, contents)
