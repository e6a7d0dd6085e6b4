"""Packing of a source's layers, for the tests of all sources."""

import io

from bootseer.prefetch.sources import ImageSource


def packed_digests(source: ImageSource) -> list[str]:
    """Pack every layer, which verifies it; return their digests."""
    with source:
        return [
            layer.pack(io.BytesIO(), lambda count: None).tree.blobs[0].digest
            for layer in source.layers
        ]
