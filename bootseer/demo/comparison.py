"""Comparison of the demo's two launches, stage by stage. Pure (no I/O)."""

from collections.abc import Mapping

from msgspec import Struct

from bootseer.demo.job import Launch
from bootseer.timeline.otlp import Stage


class Row(Struct, frozen=True):
    """Stage of both launches."""

    first_s: float
    second_s: float
    first_bytes: int
    second_bytes: int

    @property
    def ratio(self) -> float:
        """Factor by which the second launch was faster."""
        return self.first_s / self.second_s if self.second_s > 0 else 0.0


class LaunchComparison(Struct, frozen=True):
    """Stages of both launches. Bytes are those read over the network."""

    stages: Mapping[str, Row]
    total: Row
    image_bytes: int
    """Size of the image, compressed."""
    cpu_s: tuple[float, float]
    """CPU seconds of the whole machine, for each launch until its job had ended."""
    first_publish_bytes: int
    """Bytes that the first launch wrote to the store, for later launches."""
    identical: bool
    """Whether both launches loaded the same weights."""


def _seconds(launch: Launch, *names: str) -> float:
    return sum(
        (stage.end_ns - stage.start_ns) / 1e9
        for stage in launch.stages
        if stage.name in names and stage.end_ns is not None
    )


def _bytes(launch: Launch, *names: str) -> int:
    return sum(
        int(stage.attributes.get("bootseer.bytes", 0))
        for stage in launch.stages
        if stage.name in names
    )


def _until_ready(launch: Launch) -> float:
    begin_ns = min(stage.start_ns for stage in launch.stages)
    ready: list[Stage] = [stage for stage in launch.stages if stage.name == "ready"]
    return (ready[0].start_ns - begin_ns) / 1e9 if ready else launch.wall_s


# A lazy image moves work from opening it to reading its files, so both count; likewise checkpoints.
_TIMED = {
    "image": ("image", "import"),
    "environment": ("environment",),
    "checkpoint": ("checkpoint", "load"),
}


def _moved(launch: Launch, name: str) -> int:
    if name == "checkpoint":
        return launch.checkpoint_bytes_read
    counted = ("image pull", "image served") if name == "image" else (name,)
    return _bytes(launch, *counted)


def compare(
    first: Launch, second: Launch, *, image_bytes: int, published_bytes: int
) -> LaunchComparison:
    """Compare two launches; stages that neither had are left out."""
    rows: dict[str, Row] = {}
    for name, timed in _TIMED.items():
        if any(stage.name == timed[0] for stage in first.stages):
            rows[name] = Row(
                _seconds(first, *timed),
                _seconds(second, *timed),
                _moved(first, name),
                _moved(second, name),
            )
    total = Row(_until_ready(first), _until_ready(second), first.bytes_read, second.bytes_read)
    return LaunchComparison(
        stages=rows,
        total=total,
        image_bytes=image_bytes,
        cpu_s=(first.machine_cpu_s, second.machine_cpu_s),
        first_publish_bytes=published_bytes,
        identical=first.trainer["checksum"] == second.trainer["checksum"],
    )
