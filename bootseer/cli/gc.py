"""`bootseer gc`: deletion of unused objects from the shared store."""

from typing import TYPE_CHECKING

import click
from msgspec import Struct

from bootseer.base.display import display_path
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.options import AGE, FiniteRange, open_current_store
from bootseer.cli.show import emit_records, shows
from bootseer.cli.text import human_bytes, say

if TYPE_CHECKING:
    from bootseer.gc.collect import Collected
    from bootseer.gc.inventory import Inventory
    from bootseer.gc.plan import CollectionPlan


class JudgedSnapshot(Struct):
    """Snapshot of the store, and whether it is kept."""

    fingerprint: str
    names: list[str]
    targets: list[str]
    kept: bool
    reason: str


class JudgedImage(Struct):
    """Image of the store, and whether it is kept."""

    reference: str
    kept: bool
    reason: str


class FolderCounts(Struct):
    """Objects of one folder of the store."""

    folder: str
    kept_count: int = 0
    kept_bytes: int = 0
    deleted_count: int = 0
    """Number of objects that are deleted, or would be."""
    deleted_bytes: int = 0


class Collection(Struct):
    """Objects that are kept, and objects that are deleted or would be."""

    done: bool
    """Whether the objects were deleted; false without `--delete`."""
    snapshots: list[JudgedSnapshot]
    images: list[JudgedImage]
    folders: list[FolderCounts]
    deletions: list[str]
    """Keys, in the order of deletion."""
    freed_bytes: int
    spared: list[str]
    """Keys that were needed or changed in the meantime."""
    broken: list[str]
    """Records of images that were published in the meantime and lack something."""
    deleted_count: int


def _show(found: Collection) -> None:
    if found.snapshots:
        columns = ("snapshot=fingerprint", "names", "targets", "kept", "why=reason")
        emit_records(found.snapshots, *columns)
        click.echo()
    emit_records(
        found.folders,
        *("folder", "kept_count", "kept size=kept_bytes"),
        *("deleted_count", "deleted size=deleted_bytes"),
    )
    going = [one for one in found.snapshots if not one.kept]
    gone = [one.reference for one in found.images if not one.kept]
    for reference in gone:
        click.echo(f"image {reference}: delete")
    if not found.done:
        say(
            f"would delete {len(found.deletions)} objects, {human_bytes(found.freed_bytes)}, among "
            f"them {len(going)} snapshots and {len(gone)} images; give --delete to do it"
        )
        return
    say(f"deleted {found.deleted_count} objects, {human_bytes(found.freed_bytes)}")
    if found.spared:
        say(f"{len(found.spared)} objects were needed or changed meanwhile and stay")
    for key in found.broken:
        say(f"warning: {key} was published meanwhile and lacks something; index that image again")


@command("gc", epilog="Example: bootseer gc --keep-last 3 --keep-days 30 --keep 'base-*'")
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=0),
    help="Keep the newest N of the snapshots with the same targets and command.",
)
@click.option(
    "--keep-days",
    metavar="DAYS",
    type=FiniteRange(min=0),
    help="Keep snapshots that were made or used within this number of days.",
)
@click.option(
    "--keep",
    metavar="NAME",
    multiple=True,
    help="Keep these snapshots in any case: a name, a pattern of names, or the start of a key.",
)
@click.option("--snapshot", "snapshots", metavar="KEY", multiple=True, help="Delete this snapshot.")
@click.option("--image", "images", metavar="REF", multiple=True, help="Delete this image.")
@click.option(
    "--keep-starts",
    metavar="N",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Keep the timelines of the newest N starts of each job.",
)
@click.option(
    "--keep-start-days",
    metavar="DAYS",
    type=FiniteRange(min=0),
    default=90.0,
    show_default=True,
    help="Keep timelines for at most this number of days.",
)
@click.option(
    "--age",
    "grace_s",
    metavar="TIME",
    type=AGE,
    default="24h",
    show_default=True,
    help="Keep younger objects: a record that needs them may not be published yet.",
)
@click.option("--delete", is_flag=True, help="Delete; without this option, only list the objects.")
@shows(Collection, text=_show)
def gc(
    keep_last: int | None,
    keep_days: float | None,
    keep: tuple[str, ...],
    snapshots: tuple[str, ...],
    images: tuple[str, ...],
    keep_starts: int,
    keep_start_days: float,
    grace_s: float,
    delete: bool,
) -> Collection:
    """Delete the objects that no image and no snapshot in the store needs.

    Images stay unless they are named. Snapshots stay unless they are named, or --keep-last or
    --keep-days is given: then a snapshot stays if one of these options keeps it. Objects that were
    used within three days stay in any case. Timelines of old starts are deleted, and kept caches
    that were unused for 30 days, or for --keep-days.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.gc.collect import collect
    from bootseer.gc.inventory import take_inventory
    from bootseer.gc.plan import Rules, make_plan
    from bootseer.launch.formats import FORMATS

    rules = Rules(
        keep_last, keep_days, keep, snapshots, images, keep_starts, keep_start_days, grace_s
    )
    with open_current_store() as store:
        inventory = take_inventory(store, FORMATS)
        plan = make_plan(inventory, rules)
        if not delete:
            return _collection(inventory, plan, None)
        with ProgressBar("deleting", plan.freed_bytes) as progress:
            owner = current_settings().node
            done = collect(store, inventory, plan, rules, owner=owner, on_deleted=progress.advance)
    return _collection(inventory, plan, done)


def _collection(
    inventory: "Inventory", plan: "CollectionPlan", done: "Collected | None"
) -> Collection:
    deleted = set(plan.deletions)
    folders: dict[str, FolderCounts] = {}
    for key, one in inventory.objects.items():
        folder = key.partition("/")[0]
        counts = folders.setdefault(folder, FolderCounts(folder))
        if key in deleted:
            counts.deleted_count += 1
            counts.deleted_bytes += one.size_bytes
        else:
            counts.kept_count += 1
            counts.kept_bytes += one.size_bytes
    labels = inventory.labels()
    verdicts = [(entry, key, plan.verdicts[key]) for key, entry in inventory.entries()]
    return Collection(
        done=done is not None,
        snapshots=[
            JudgedSnapshot(
                entry.name,
                list(labels.get(key, ())),
                list(map(display_path, entry.targets)),
                verdict.is_kept,
                verdict.reason,
            )
            for entry, key, verdict in verdicts
            if entry.kind == "snapshot"
        ],
        images=[
            JudgedImage(entry.name, verdict.is_kept, verdict.reason)
            for entry, _, verdict in verdicts
            if entry.kind == "image"
        ],
        folders=list(folders.values()),
        deletions=list(plan.deletions),
        freed_bytes=plan.freed_bytes if done is None else done.freed_bytes,
        spared=list(done.spared) if done else [],
        broken=list(done.broken) if done else [],
        deleted_count=done.deleted_count if done else 0,
    )
