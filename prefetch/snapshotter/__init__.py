"""A snapshotter for containerd: images that the store knows appear without being pulled.

From the inside out: `snapshot` (what a snapshot is and what it shows, pure), `filters` (pure),
`metadata` (the database), `chain_trees` (chains that the store has, and their trees), `served`
(the FUSE mounts), `directories`, `core` (the operations), `wire` and `service` (gRPC).
See docs/containerd.md.
"""
