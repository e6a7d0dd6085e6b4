"""How long until `import torch` has run on a node that has never seen the image?"""

from bench.containers.cases import image_case
from bench.model import Bound, Target, ratio
from testbed.images.workloads import TORCH

CASE = image_case(
    "image",
    TORCH,
    1000,
    (
        ratio("replay", "soci", "wall_s", "time", Target(Bound.AT_MOST, 0.5)),
        ratio("replay", "containerd 1.6", "wall_s", "time", Target(Bound.AT_MOST, 0.125)),
        ratio("replay", "containerd 2.1", "wall_s", "time", Target(Bound.AT_MOST, 0.125)),
        ratio("replay", "containerd local", "wall_s", "time", Target(Bound.AT_MOST, 1.4)),
        ratio("replay", "soci", "moved_bytes", "bytes", Target(Bound.AT_MOST, 1 / 3)),
        ratio("lazy", "soci", "wall_s", "time", Target(Bound.AT_MOST, 1)),
        ratio("record", "lazy", "wall_s", "time", Target(Bound.AT_MOST, 1.1)),
        ratio("unindexed", "containerd 1.6", "wall_s", "time", Target(Bound.AT_MOST, 1.05)),
        ratio("replay rebuilt", "replay", "wall_s", "time"),
    ),
)
