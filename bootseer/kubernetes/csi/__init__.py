"""The CSI driver `csi.bootseer.io`: images, environments and checkpoints as volumes of pods.

From the inside out: `attributes` (what a volume is to be, pure), `records` (what is published),
`upper_layer`, `binding`, `trees` and `checkpoints` (what stands behind volumes), `driver` (the
operations), `wire` and `service` (gRPC).
"""
