"""`bootseer demo`: the whole of Bootseer on one machine, without a server."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.base.documents import to_builtins
from bootseer.cli.output import emit_json, emit_table, human_bytes, json_option
from bootseer.errors import BootseerError, NoSpaceError, from_oserror

if TYPE_CHECKING:
    from bootseer.demo.comparison import Comparison, Row

_GIB = 1 << 30
# Image, packages, two checkpoints, the store and two nodes' caches.
_DISK_BYTES_BESIDE_CHECKPOINTS = 3 * _GIB


def _say(sentence: str) -> None:
    click.echo(f"demo: {sentence}", err=True)


def _row_json(row: "Row") -> dict[str, Any]:
    return {**to_builtins(row), "ratio": row.ratio}


def _json(result: "Comparison", left_out: dict[str, str], network: dict[str, int]) -> Any:
    image = result.stages.get("image")
    share = image.second_bytes / result.image_bytes if image and result.image_bytes else None
    return {
        "stages": {name: _row_json(row) for name, row in result.stages.items()},
        "total": {
            **_row_json(result.total),
            "first_cpu_s": result.cpu_s[0],
            "second_cpu_s": result.cpu_s[1],
        },
        "image": {"bytes": result.image_bytes, "touched_share": share},
        "published_bytes": result.first_publish_bytes,
        "identical": result.identical,
        "left_out": left_out,
        "network": network,
    }


def _cells(name: str, row: "Row", note: str = "") -> tuple[object, ...]:
    return (
        name,
        f"{row.first_s:.2f}",
        f"{row.second_s:.2f}",
        f"{row.ratio:.1f}x",
        human_bytes(row.first_bytes),
        human_bytes(row.second_bytes),
        note,
    )


def _print(result: "Comparison") -> None:
    rows = []
    for name, row in result.stages.items():
        note = ""
        if name == "image":
            share = row.second_bytes / result.image_bytes
            note = f"{share:.0%} of the image's {human_bytes(result.image_bytes)} moved"
        rows.append(_cells(name, row, note))
    rows.append(_cells("until ready", result.total, "stages overlap"))
    emit_table(("stage", "first s", "second s", "ratio", "first moved", "second moved", ""), rows)


@click.command(epilog="Example: bootseer demo --json")
@click.option(
    "--link-mbit",
    type=click.IntRange(8, 1_000_000),
    default=4000,
    show_default=True,
    help="The network of one node, in Mbit/s.",
)
@click.option(
    "--file-mbyte",
    type=click.IntRange(1, 1_000_000),
    default=50,
    show_default=True,
    help="How fast the storage serves one file, in MB/s.",
)
@click.option("--quick", is_flag=True, help="A checkpoint of 128 MiB instead of 1 GiB.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    help="Where to work; a folder in it is made, and removed. Default: /var/tmp.",
)
@click.option("--keep", is_flag=True, help="Leave the folder, to look into it.")
@json_option
@click.pass_context
def demo(
    context: click.Context,
    /,
    link_mbit: int,
    file_mbyte: int,
    quick: bool,
    parent: Path | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Launch a job twice on this machine, on two "nodes" with empty caches, and compare.

    Image, environment, checkpoint, FUSE mounts and container are real. Only the network is not:
    image, store and checkpoints are on this disk, behind a rate limit that stands for a shared
    network. As root it shows everything; without, it says what it leaves out.
    """
    from bootseer.demo.abilities import left_out_of
    from bootseer.demo.comparison import compare
    from bootseer.demo.job import Network, Plan, World

    left_out = left_out_of()
    for stage, reason in left_out.items():
        _say(f"leaving out the {stage}: {reason}")
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
    plan = Plan(
        folder=folder,
        network=network,
        checkpoint_bytes=checkpoint_bytes,
        with_image="image" not in left_out,
        with_environment="environment" not in left_out,
        with_checkpoint="checkpoint" not in left_out,
    )
    world = World(plan, _say)
    try:
        world.build()
        _say(
            f"the network is a rate limit: {link_mbit} Mbit/s for the node, "
            f"{file_mbyte} MB/s for each stored file"
        )
        _say("first launch, on a node that has nothing: pulls, installs, reads, and records")
        first = world.launch(1)
        if plan.with_image:
            _say("the image and the record of the first launch are being published")
            world.await_record()
        published_bytes = world.bytes_written()
        _say("second launch, on another node that has nothing: replays")
        second = world.launch(2)
    finally:
        if keep:
            _say(f"everything is left in {folder}")
        else:
            world.remove()
    result = compare(first, second, image_bytes=world.image_bytes, published_bytes=published_bytes)
    if not result.identical:
        raise BootseerError("the two launches loaded different bytes; please report this")
    if as_json:
        emit_json(_json(result, left_out, to_builtins(network)))
        return
    _print(result)
    _say("both launches loaded the same bytes")
    context.exit(0)
