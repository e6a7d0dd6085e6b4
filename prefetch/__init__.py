"""Container images, lazily, in pages: index once, then mount and run on any node.

- index: `sources`, `merge`, `indexing`, `records`, `catalogue`: from an image to blobs and a tree
- serve: `cache`, `streams`, `tree_fs`, `server`, `serve`, `mount`: from a tree to a mount
- keep: `keeper`, `fill`, `cache_room`, `figures`: beside a mount, for the node and its operators
- learn: `trace`, `hotset`, `bundle`, `hot_store`, `publish`, `replay`: from one start to the next
- run: `container`, `container_root`, `run`, `oci_runtime`: from a mount to a process

Callers use `mount.mount_image`, `container.prepare_container` and `run.run_image`. Nothing is
imported here, so that each part costs only itself.
"""
