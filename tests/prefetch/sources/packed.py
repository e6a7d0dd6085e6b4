"""What the tests of sources ask of every one: its layers, packed."""

import io

from bootseer.prefetch.sources import ImageSource


def packed_digests(source: ImageSource) -> list[str]:
    """Packs every layer, which verifies it."""
    with source:
        return [
            layer.pack(io.BytesIO(), lambda count: None).tree.blobs[0].digest
            for layer in source.layers
        ]
