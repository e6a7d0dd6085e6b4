"""All of a served tree, an image's or an environment's, brought into the node's cache at once."""

from bootseer.base.progress import Progress
from bootseer.errors import NoSpaceError
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.streams.streams import BlobStreams
from bootseer.settings.config import Settings
from bootseer.store import Store


def fetch_tree(
    settings: Settings, store: Store, index_digest: str, name: str, *, is_local: bool = False
) -> int:
    """Bring all blobs of the tree whose index this node has into its cache; returns their bytes.

    `is_local`: see `BlobStreams`. Raises: NoSpaceError, CorruptError, NotFoundError, BootseerError.
    """
    tree = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    size_bytes = sum(blob.size_bytes for blob in tree.blobs)
    with Progress(f"fetching {name}", size_bytes) as progress:
        streams = BlobStreams(
            tree.blobs,
            store.read_verified,
            NodeCache(settings.cache_dir),
            deadline_s=settings.deadline_s,
            on_progress=progress.advance,
            is_local=is_local,
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
