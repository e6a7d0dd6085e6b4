"""The same as `image` for a shell, which needs next to nothing of the image."""

from bench.containers.cases import image_case
from bench.model import Bound, Target, ratio
from testbed.images.workloads import SHELL

CASE = image_case(
    "image-shell",
    SHELL,
    1000,
    (
        ratio("replay", "estargz", "wall_s", "time"),
        ratio("replay", "soci", "wall_s", "time"),
        ratio("replay", "containerd 1.6", "wall_s", "time"),
        ratio("replay", "containerd 2.1", "wall_s", "time"),
        ratio("replay", "containerd local", "wall_s", "time"),
        ratio("replay", "soci", "moved_bytes", "bytes"),
        ratio("lazy", "soci", "wall_s", "time", Target(Bound.AT_MOST, 1)),
        ratio("record", "lazy", "wall_s", "time", Target(Bound.AT_MOST, 1.1)),
    ),
)
