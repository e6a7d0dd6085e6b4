"""The one format for image layers and snapshots: a seekable tar.zst and its tree index.

`tree` is the model, `build` makes one, `index` is its codec; `pack` makes blobs, `frames` and
`read` read them at random, `extract` writes a tree to disk. The formats:
docs/format/blob.md, docs/format/index.md.
"""
