"""A snapshotter for containerd, which uses images of the store without pulling them.

From the inside out: `snapshot` (the model, pure), `metadata` (the database), `chain_trees` (chains
of the store and their trees), `lazy_trees` (the FUSE mounts), `pulled` (indexing of other images),
`core` (the operations, and the folder), `service` (gRPC). Public: `core`, `service`, and
`lazy_trees`, which the CSI driver uses as well. See docs/containerd.md.
"""
