"""`bootseer snapshot diff` and `verify`: what snapshots hold, compared and checked.

The group `snapshot` is in `snapshot_commands`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.base.shown import shown
from bootseer.cli.output import (
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    open_current_store,
    printable,
)
from bootseer.errors import CorruptError

if TYPE_CHECKING:
    from bootseer.snapshots.diff import Comparison


@click.command(epilog="Example: bootseer snapshot diff base-env 3f2a91 --packages")
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", required=False)
@click.option("--packages", "packages_only", is_flag=True, help="No files.")
@json_option
def diff(before: str, after: str | None, packages_only: bool, as_json: bool) -> None:
    """Show what differs from snapshot A to B: packages and their versions, and files.

    B is another snapshot, or a directory (a path with a "/" in it). Without B: what lies on this
    host where A belongs. Files are compared by content, mode, owner, link and extended attributes,
    not by time.
    """
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.diff import compare, disk_view, snapshot_view

    with open_current_store() as store:
        first = catalogue.find(store, before)
        view = snapshot_view(store, first)
        if after is None or "/" in after:
            other = disk_view(first, Path(after).absolute() if after else None)
        else:
            other = snapshot_view(store, catalogue.find(store, after))
    comparison = compare(view, other)
    if as_json:
        emit_json(_comparison(comparison, packages_only))
        return
    if comparison.packages:
        emit_table(
            ("package", "before", "after"),
            (
                (
                    one.package.name
                    if one.package.kind == "python"
                    else f"{one.package.name} ({one.package.kind})",
                    one.before or "-",
                    one.after or "-",
                )
                for one in comparison.packages
            ),
        )
    if packages_only:
        return
    if comparison.packages:
        click.echo()
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for change in comparison.files:
        what = f" ({', '.join(change.what)})" if change.what else ""
        click.echo(f"{signs[change.kind]} {printable(shown(change.path))}{what}")
    grown = sum(change.after_bytes - change.before_bytes for change in comparison.files)
    counts = ", ".join(
        f"{sum(change.kind == kind for change in comparison.files)} {kind}" for kind in signs
    )
    click.echo(
        f"{counts}; {human_bytes(grown)} more"
        if grown >= 0
        else f"{counts}; {human_bytes(-grown)} less"
    )


def _comparison(comparison: "Comparison", packages_only: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "equal": comparison.is_equal,
        "packages": [
            {
                "kind": one.package.kind,
                "name": one.package.name,
                "before": one.before,
                "after": one.after,
            }
            for one in comparison.packages
        ],
    }
    if not packages_only:
        document["files"] = [
            {
                "path": shown(change.path),
                "change": change.kind,
                "what": list(change.what),
                "before_bytes": change.before_bytes,
                "after_bytes": change.after_bytes,
            }
            for change in comparison.files
        ]
    return document


@click.command(epilog="Example: bootseer snapshot verify --all --quick")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every snapshot in the store.")
@click.option("--quick", is_flag=True, help="Only whether all is there and of the right size.")
@json_option
def verify(keys: tuple[str, ...], every: bool, quick: bool, as_json: bool) -> None:
    """Check that snapshots can be restored: read all they consist of, against the digests.

    Exits with 15 where something is damaged or missing. A damaged snapshot is replaced by the
    next set-up that would use it.
    """
    from bootseer.base.progress import Progress
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.catalogue import Verifier

    if every == bool(keys):
        raise click.UsageError("Give the snapshots to check, or --all.")
    verdicts = []
    with open_current_store() as store, Progress("verifying") as progress:
        verifier = Verifier(store, quick=quick, on_progress=progress.advance)
        found = (
            list(catalogue.fingerprints(store))
            if every
            else [catalogue.fingerprint_of(store, key) for key in keys]
        )
        for fingerprint in dict.fromkeys(found):
            verdicts.append(verifier.check(fingerprint))
    damaged = [verdict for verdict in verdicts if verdict.problems]
    if as_json:
        emit_json(
            [
                {
                    "fingerprint": verdict.fingerprint,
                    "name": verdict.name,
                    "ok": not verdict.problems,
                    "problems": list(verdict.problems),
                }
                for verdict in verdicts
            ]
        )
    else:
        emit_table(
            ("key", "name", "found"),
            (
                (
                    verdict.fingerprint[:12],
                    verdict.name,
                    "; ".join(verdict.problems) or "ok",
                )
                for verdict in verdicts
            ),
        )
    if damaged:
        raise CorruptError(f"{len(damaged)} of {len(verdicts)} snapshots are damaged")
