"""Format of image layers and snapshots: blobs (seekable tar.zst) and the index of their tree.

`tree` is the model, `build` creates trees, `index` is the codec, `pack` makes blobs, `frames` and
`read` read them at any offset, `extract` writes a tree to disk. May import `base`, `errors` and
`linux`. The formats: docs/format/blob.md, docs/format/index.md.
"""
