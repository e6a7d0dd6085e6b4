"""Codec of the tree index, and bounded decompression of a document's zstd frame."""
