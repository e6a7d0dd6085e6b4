"""Container images, mounted lazily: indexed once, then mounted and run on any node.

- from an image to blobs and a tree in the store: `sources`, `index`, `publish`
- from a name to a mounted image: `images`
- from a tree to a mount: `cache`, `reading`, `serve`
- from one start to the next: `record`, `bundle`
- from a mount to a process: `container`, `snapshotter`
- for directories that are not images: `warm`

Callers use `images.mount.mount_image` and `container.container.prepare_container`. This module
imports nothing, so that a start loads only the parts that it uses.
"""
