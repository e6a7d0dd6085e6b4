"""Where an image's bytes come from when the store has lost or damaged them: its registry.

Only for images that are called as in a registry (`HOST/NAME:TAG`): a name of the user's own says
nothing about where the image is. Thread-safe; bounded by the registry client's deadlines.
"""

import re

from bootseer.blob.tree import Blob
from bootseer.errors import NotFoundError
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.cache.stream_keys import is_stored, own_key
from bootseer.prefetch.reading.repairs import Came, Repair
from bootseer.settings.config import Settings

_IN_REGISTRY = re.compile(r"(?:[^/]*[.:][^/]*|localhost)/.+")
"""A first part that can only be a host, as Docker tells hosts from names."""
_WAIT_S = 600.0
"""How long to wait for another server of this node that fetches the same layer."""


def second_source(settings: Settings, reference: str, owner: str) -> Repair | None:
    """Return a function that brings streams of the image `reference` whole into the node cache, for
    the image `owner` alone (`stream_keys.owner_of`); None if the image is in no known registry."""
    if not _IN_REGISTRY.fullmatch(reference):
        return None

    def repair(blob: Blob, came: Came) -> None:
        """Raises: BootseerError."""
        # Most servers never need what speaks to registries.
        from bootseer.prefetch.index.source_names import REGISTRY
        from bootseer.prefetch.sources import open_source

        digest = blob.stream_digest
        # What the node has under the digest alone is left aside: the index may name a stream that
        # whoever wrote it never had. Only what the registry sends now, it can have. This node's own
        # index is believed.
        cache = NodeCache(settings.cache_dir)
        key = own_key(blob, owner) if is_stored(blob) else digest
        with cache.pulling(key, _WAIT_S):
            whole = cache.open_whole(key)
            if whole is not None:
                whole.close()
                return
            with open_source(
                f"{REGISTRY}{reference}",
                settings.cache_dir / "work",
                registry_hosts_dir=settings.registry_hosts_dir,
                deadline_s=settings.deadline_s,
            ) as source:
                layer = next((one for one in source.layers if one.digest == digest), None)
                if layer is None:
                    raise NotFoundError(f"{reference} has no layer {digest} any more")
                with cache.new_stream() as new:
                    # Verifies the stream against its digest before it returns.
                    layer.pull(new.append, came)
                    new.commit(key).close()

    return repair
