"""`bootseer demo`: two launches of a job on one machine, compared stage by stage."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict

from bootseer.cli.command_tree import command
from bootseer.cli.show import emit_table, shows
from bootseer.cli.text import human_bytes, print_stderr
from bootseer.errors import BootseerError, NoSpaceError, from_oserror

if TYPE_CHECKING:
    from bootseer.demo.job import Launch, Network
    from bootseer.timeline.otlp import Stage

_GIB = 1 << 30
# Space for the image, the packages, the store and the caches of two nodes.
_DISK_BYTES_BESIDE_CHECKPOINTS = 3 * _GIB


def _print_step(sentence: str) -> None:
    print_stderr(f"demo: {sentence}")


class ComparedStage(Struct):
    """Stage of both launches."""

    first_s: float
    second_s: float
    first_bytes: int
    """Bytes moved over the simulated network."""
    second_bytes: int
    ratio: float
    """Factor by which the second launch was faster."""
    first_cpu_s: float | UnsetType = UNSET
    """CPU time of the whole machine; of the total alone."""
    second_cpu_s: float | UnsetType = UNSET


class ComparedImage(Struct):
    """Image of the demo."""

    bytes: int
    touched_share: float | None
    """Share of the image that the second launch moved."""


class ComparedLaunches(Struct):
    """Two launches of one job, compared."""

    stages: dict[str, ComparedStage]
    """Stages by name."""
    total: ComparedStage
    """Everything until ready."""
    image: ComparedImage
    published_bytes: int
    """Bytes that the first launch and its publishers wrote to the store."""
    left_out: dict[str, str]
    """Reason for each stage that this machine cannot show."""
    network: dict[str, int]
    """Rates of the simulated network."""


# A lazy image moves work from opening it to reading its files, so both count; likewise checkpoints.
_TIMED = {
    "image": ("image", "import"),
    "environment": ("environment",),
    "checkpoint": ("checkpoint", "load"),
}


def _compare(
    first: "Launch",
    second: "Launch",
    *,
    image_bytes: int,
    published_bytes: int,
    left_out: dict[str, str],
    network: "Network",
) -> ComparedLaunches:
    """Compare two launches; stages that neither had are left out. Raises: BootseerError."""
    if first.trainer["checksum"] != second.trainer["checksum"]:
        raise BootseerError("the two launches loaded different bytes; please report this")
    stages = {
        name: _compared(
            (_seconds(first, timed), _seconds(second, timed)),
            (_moved_bytes(first, name), _moved_bytes(second, name)),
        )
        for name, timed in _TIMED.items()
        if any(stage.name == timed[0] for stage in first.stages)
    }
    total = _compared(
        (_until_ready_s(first), _until_ready_s(second)), (first.bytes_read, second.bytes_read)
    )
    total.first_cpu_s, total.second_cpu_s = first.machine_cpu_s, second.machine_cpu_s
    image = stages.get("image")
    share = image.second_bytes / image_bytes if image and image_bytes else None
    return ComparedLaunches(
        stages=stages,
        total=total,
        image=ComparedImage(image_bytes, share),
        published_bytes=published_bytes,
        left_out=left_out,
        network=asdict(network),
    )


def _compared(seconds: tuple[float, float], moved_bytes: tuple[int, int]) -> ComparedStage:
    ratio = seconds[0] / seconds[1] if seconds[1] > 0 else 0.0
    return ComparedStage(*seconds, *moved_bytes, ratio)


def _named(launch: "Launch", names: tuple[str, ...]) -> "list[Stage]":
    return [stage for stage in launch.stages if stage.name in names]


def _seconds(launch: "Launch", names: tuple[str, ...]) -> float:
    stages = _named(launch, names)
    return sum((one.end_ns - one.start_ns) / 1e9 for one in stages if one.end_ns is not None)


def _moved_bytes(launch: "Launch", name: str) -> int:
    if name == "checkpoint":
        return launch.checkpoint_bytes_read
    stages = _named(launch, ("image pull", "image served") if name == "image" else (name,))
    return sum(int(one.attributes.get("bootseer.bytes", 0)) for one in stages)


def _until_ready_s(launch: "Launch") -> float:
    begin_ns = min(stage.start_ns for stage in launch.stages)
    ready = _named(launch, ("ready",))
    return (ready[0].start_ns - begin_ns) / 1e9 if ready else launch.wall_s


def _cells(name: str, row: ComparedStage, note: str = "") -> tuple[object, ...]:
    return (
        name,
        f"{row.first_s:.2f}",
        f"{row.second_s:.2f}",
        f"{row.ratio:.1f}x",
        human_bytes(row.first_bytes),
        human_bytes(row.second_bytes),
        note,
    )


def _show(found: ComparedLaunches) -> None:
    rows = []
    for name, row in found.stages.items():
        note = ""
        if name == "image" and found.image.touched_share is not None:
            size = human_bytes(found.image.bytes)
            note = f"{found.image.touched_share:.0%} of the image's {size} moved"
        rows.append(_cells(name, row, note))
    rows.append(_cells("until ready", found.total, "stages overlap"))
    emit_table(("stage", "first s", "second s", "ratio", "first moved", "second moved", ""), rows)
    _print_step("both launches loaded the same bytes")


@command("demo", epilog="Example: bootseer demo --json")
@click.option(
    "--link-mbit",
    type=click.IntRange(8, 1_000_000),
    default=4000,
    show_default=True,
    help="Network rate of one node, in Mbit/s.",
)
@click.option(
    "--file-mbyte",
    type=click.IntRange(1, 1_000_000),
    default=50,
    show_default=True,
    help="Rate at which the storage serves one file, in MB/s.",
)
@click.option("--quick", is_flag=True, help="Use a checkpoint of 128 MiB instead of 1 GiB.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    help="Parent of the temporary folder. Default: /var/tmp.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary folder.")
@shows(ComparedLaunches, text=_show)
def demo(
    link_mbit: int,
    file_mbyte: int,
    quick: bool,
    parent: Path | None,
    keep: bool,
) -> ComparedLaunches:
    """Launch a job twice on this machine, on two "nodes" with empty caches, and compare.

    Image, environment, checkpoint, FUSE mounts and container are real. Only the network is
    simulated: image, store and checkpoints are on this disk, behind a rate limit. Without root,
    some stages are left out and listed.
    """
    from bootseer.demo.job import Demo, DemoPlan, Network, stages_left_out

    left_out = stages_left_out()
    for stage, reason in left_out.items():
        _print_step(f"leaving out the {stage}: {reason}")
    network = Network(link_mbit * 125_000, file_mbyte * 1_000_000)
    checkpoint_bytes = _GIB // 8 if quick else _GIB
    parent = parent or Path("/var/tmp")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < 3 * checkpoint_bytes + _DISK_BYTES_BESIDE_CHECKPOINTS:
            raise NoSpaceError(
                f"{parent} has {human_bytes(free_bytes)} free; the demo needs "
                f"{human_bytes(3 * checkpoint_bytes + _DISK_BYTES_BESIDE_CHECKPOINTS)}; "
                "choose another disk with --dir"
            )
        folder = Path(tempfile.mkdtemp(prefix="bootseer-demo-", dir=parent))
    except OSError as error:
        if isinstance(error, BootseerError):
            raise
        raise from_oserror(error, f"work in {parent}") from error
    plan = DemoPlan(
        folder=folder,
        network=network,
        checkpoint_bytes=checkpoint_bytes,
        with_image="image" not in left_out,
        with_environment="environment" not in left_out,
        with_checkpoint="checkpoint" not in left_out,
    )
    demo = Demo(plan, _print_step)
    try:
        demo.build()
        _print_step(
            f"the network is a rate limit: {link_mbit} Mbit/s for the node, "
            f"{file_mbyte} MB/s for each stored file"
        )
        _print_step("first launch, on a node that has nothing: pulls, installs, reads, and records")
        first = demo.launch(1)
        if plan.with_image:
            _print_step("the image and the record of the first launch are being published")
            demo.await_record()
        published_bytes = demo.bytes_written()
        _print_step("second launch, on another node that has nothing: replays")
        second = demo.launch(2)
    finally:
        if keep:
            _print_step(f"everything is left in {folder}")
        else:
            demo.remove()
    return _compare(
        first,
        second,
        image_bytes=demo.image_bytes,
        published_bytes=published_bytes,
        left_out=left_out,
        network=network,
    )
