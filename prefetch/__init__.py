"""Container images, lazily, in pages: index once, then mount and run on any node.

- from an image to blobs and a tree in the store: `sources`, `index`, `publish`
- from a name to an image that can be mounted: `resolve`
- from a tree to a mount: `cache`, `streams`, `serve`, `mounts`
- from one start to the next: `record`, `bundle`
- from a mount to a process: `container`, `snapshotter`
- for directories that are not images: `warm`

Callers use `resolve.mount.mount_image` and `container.container.prepare_container`. Nothing is
imported here, so that each part costs only itself.
"""
