"""Fetching of a whole tree, an image's or an environment's, into the node's cache."""

from bootseer.base.progress import Progress
from bootseer.errors import NoSpaceError
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.settings.config import Settings
from bootseer.store import Store


def fetch_tree(
    settings: Settings, store: Store, index_digest: str, name: str, *, is_local: bool = False
) -> int:
    """Bring all blobs of the tree whose index this node has into its cache. Return their stored
    size in bytes, of which only what the node lacks is moved.

    `is_local`: whether this node made the index, of streams that it pulled. Raises: NoSpaceError,
    CorruptError, NotFoundError, BootseerError.
    """
    tree = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    size_bytes = sum(blob.size_bytes for blob in tree.blobs)
    with Progress(f"fetching {name}", size_bytes) as progress:
        streams = ImageBytes(
            tree.blobs,
            store.read_verified,
            NodeCache(settings.cache_dir),
            deadline_s=settings.deadline_s,
            on_progress=progress.advance,
            vouched=vouched_streams(settings, index_digest, tree.blobs, is_local=is_local),
        )
        try:
            streams.fill()
            if streams.fill_fetches():
                raise NoSpaceError(
                    f"cannot fetch all of {name}: {settings.cache_dir} is full; "
                    "free space or set --cache-dir to a larger disk"
                )
        finally:
            streams.close()
    return size_bytes
