"""`bootseer store`: the shared store as a whole."""

from typing import TYPE_CHECKING, Any

import click

from bootseer.base.shown import shown
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    Age,
    FiniteRange,
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    open_current_store,
    say,
)

if TYPE_CHECKING:
    from bootseer.gc.collect import Collected
    from bootseer.gc.inventory import Inventory
    from bootseer.gc.plan import Plan


@click.group(cls=LazyGroup)
def store() -> None:
    """The shared store: delete what nobody needs."""


@store.command(
    epilog="Example: bootseer store gc --keep-last 3 --keep-days 30 --keep 'base-*'",
)
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=0),
    help="Of the snapshots with the same targets and command keep the newest N.",
)
@click.option(
    "--keep-days",
    metavar="DAYS",
    type=FiniteRange(min=0),
    help="Keep snapshots that were made or used within so many days.",
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
    help="Of each job keep the timelines of the newest N starts.",
)
@click.option(
    "--keep-start-days",
    metavar="DAYS",
    type=FiniteRange(min=0),
    default=90.0,
    show_default=True,
    help="Keep timelines for so many days at most.",
)
@click.option(
    "--age",
    "grace_s",
    metavar="TIME",
    type=Age(),
    default="24h",
    show_default=True,
    help="Keep what is younger: somebody may be publishing what needs it.",
)
@click.option("--delete", is_flag=True, help="Delete. Without it, only say what would go.")
@json_option
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
    as_json: bool,
) -> None:
    """Delete what no image and no snapshot in the store needs any more.

    Images and snapshots themselves stay, unless they are named or, for snapshots, --keep-last or
    --keep-days are given: then a snapshot stays if one of these keeps it. What was used within
    three days stays readable in any case. Timelines of old starts go. Kept caches go when nobody
    used them for 30 days, or for --keep-days.
    """
    from bootseer.base.progress import Progress
    from bootseer.gc.collect import collect
    from bootseer.gc.inventory import take_inventory
    from bootseer.gc.plan import make_plan
    from bootseer.gc.retention import Rules
    from bootseer.launch.formats import FORMATS

    settings = current_settings()
    rules = Rules(
        keep_last, keep_days, keep, snapshots, images, keep_starts, keep_start_days, grace_s
    )
    with open_current_store() as opened:
        inventory = take_inventory(opened, FORMATS)
        plan = make_plan(inventory, rules)
        done = None
        if delete:
            with Progress("deleting", plan.freed_bytes) as progress:
                done = collect(
                    opened,
                    inventory,
                    plan,
                    rules,
                    owner=settings.node,
                    on_deleted=progress.advance,
                )
    if as_json:
        emit_json(_document(inventory, plan, done))
    else:
        _show(inventory, plan, done)


def _show(inventory: "Inventory", plan: "Plan", done: "Collected | None") -> None:
    document = _document(inventory, plan, done)
    going = [one for one in document["snapshots"] if not one["kept"]]
    if document["snapshots"]:
        emit_table(
            ("snapshot", "name", "targets", "", "why"),
            (
                (
                    one["fingerprint"][:12],
                    ", ".join(one["names"]),
                    ", ".join(one["targets"]),
                    "keep" if one["kept"] else "delete",
                    one["reason"],
                )
                for one in document["snapshots"]
            ),
        )
        click.echo()
    emit_table(
        ("folder", "kept count", "kept size", "deleted count", "deleted size"),
        (
            (
                one["folder"],
                one["kept_count"],
                human_bytes(one["kept_bytes"]),
                one["deleted_count"],
                human_bytes(one["deleted_bytes"]),
            )
            for one in document["folders"]
        ),
    )
    gone = [one["reference"] for one in document["images"] if not one["kept"]]
    for reference in gone:
        click.echo(f"image {reference}: delete")
    if done is None:
        say(
            f"would delete {len(plan.deletions)} objects, {human_bytes(plan.freed_bytes)}, among "
            f"them {len(going)} snapshots and {len(gone)} images; give --delete to do it"
        )
        return
    say(f"deleted {done.deleted_count} objects, {human_bytes(done.freed_bytes)}")
    if done.spared:
        say(f"{len(done.spared)} objects were needed or changed meanwhile and stay")
    for key in done.broken:
        say(f"warning: {key} was published meanwhile and lacks something; index that image again")


def _document(inventory: "Inventory", plan: "Plan", done: "Collected | None") -> dict[str, Any]:
    deleted = set(plan.deletions)
    folders: dict[str, dict[str, Any]] = {}
    for key, one in inventory.objects.items():
        folder = key.partition("/")[0]
        counts = folders.setdefault(
            folder,
            {
                "folder": folder,
                "kept_count": 0,
                "kept_bytes": 0,
                "deleted_count": 0,
                "deleted_bytes": 0,
            },
        )
        kind = "deleted" if key in deleted else "kept"
        counts[f"{kind}_count"] += 1
        counts[f"{kind}_bytes"] += one.size_bytes
    labels = inventory.labels()
    verdicts = [(entry, key, plan.verdicts[key]) for key, entry in inventory.entries()]
    return {
        "done": done is not None,
        "snapshots": [
            {
                "fingerprint": entry.name,
                "names": list(labels.get(key, ())),
                "targets": list(map(shown, entry.targets)),
                "kept": verdict.is_kept,
                "reason": verdict.reason,
            }
            for entry, key, verdict in verdicts
            if entry.kind == "snapshot"
        ],
        "images": [
            {"reference": entry.name, "kept": verdict.is_kept, "reason": verdict.reason}
            for entry, key, verdict in verdicts
            if entry.kind == "image"
        ],
        "folders": list(folders.values()),
        "deletions": list(plan.deletions),
        "freed_bytes": plan.freed_bytes if done is None else done.freed_bytes,
        "spared": list(done.spared) if done else [],
        "broken": list(done.broken) if done else [],
    }
