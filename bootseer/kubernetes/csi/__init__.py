"""CSI driver `csi.bootseer.io`: images, environments and checkpoints as volumes of pods.

From the inside out: `attributes` parses a volume's attributes (pure), `volumes` mounts, `driver`
has the operations, `service` speaks gRPC.
"""
