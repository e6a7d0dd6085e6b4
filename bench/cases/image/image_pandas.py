"""The same as `image` for a script that imports torch and pandas and reads a data file."""

from bench.containers.cases import image_case
from bench.model import Bound, Target, ratio
from testbed.images.workloads import PANDAS

CASE = image_case(
    "image-pandas",
    PANDAS,
    1000,
    (
        ratio("replay", "soci", "wall_s", "time"),
        ratio("replay", "containerd 1.6", "wall_s", "time"),
        ratio("replay", "containerd 2.1", "wall_s", "time"),
        ratio("replay", "containerd local", "wall_s", "time"),
        ratio("replay", "soci", "moved_bytes", "bytes"),
        ratio("lazy", "soci", "wall_s", "time", Target(Bound.AT_MOST, 1)),
        ratio("record", "lazy", "wall_s", "time", Target(Bound.AT_MOST, 1.1)),
    ),
)
