"""`bootseer snapshot`: environments, captured once and restored everywhere.

Here is what a single snapshot is made, restored and shown by; running set-ups is in
`snapshot_run_commands`.
"""

import contextlib
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from bootseer.base.shown import shown
from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
    open_current_store,
    say,
)
from bootseer.cli.snapshot.snapshot_output import mode_option, summary

if TYPE_CHECKING:
    from bootseer.blob.tree import Inode
    from bootseer.snapshots.manifest import Manifest


_ELSEWHERE = {
    "run": ("snapshot.snapshot_run_commands", "run"),
    "explain": ("snapshot.snapshot_run_commands", "explain"),
    "diff": ("snapshot.snapshot_check_commands", "diff"),
    "verify": ("snapshot.snapshot_check_commands", "verify"),
    "export": ("snapshot.snapshot_archive_commands", "export"),
    "import": ("snapshot.snapshot_archive_commands", "import_"),
    "fetch": ("snapshot.snapshot_archive_commands", "fetch"),
}


@click.group(cls=LazyGroup, elsewhere=_ELSEWHERE)
def snapshot() -> None:
    """Environments: capture once, restore everywhere."""


@snapshot.command(epilog="Example: bootseer snapshot create --target /opt/env --name base-env")
@click.option(
    "--target", "targets", metavar="DIR", multiple=True, required=True, help="A directory."
)
@click.option("--name", metavar="NAME", default="", help="A name for `restore` and `show`.")
@json_option
def create(targets: tuple[str, ...], name: str, as_json: bool) -> None:
    """Capture existing directories as they are."""
    from bootseer.snapshots.archive import create_snapshot

    manifest = create_snapshot(current_settings(), targets, name)
    if as_json:
        emit_json(summary(manifest))
    else:
        click.echo(manifest.fingerprint)
        say(
            f"stored {manifest.file_count} files, {human_bytes(manifest.content_bytes)}, "
            f"as {human_bytes(manifest.stored_bytes)}"
        )


@snapshot.command(epilog="Example: bootseer snapshot restore base-env")
@click.argument("key")
@click.option(
    "--to",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Another place; without --relocate only for a directory that holds no path of its own.",
)
@click.option(
    "--relocate",
    "relocates",
    is_flag=True,
    help="Change the paths in an environment, so that it works in the place given with --to.",
)
@click.option(
    "--system",
    "allows_system",
    is_flag=True,
    help="Also into directories of the system, such as /usr/bin and /etc, or a user's settings.",
)
@mode_option
@json_option
def restore(
    key: str,
    directory: Path | None,
    relocates: bool,
    allows_system: bool,
    mode: str | None,
    as_json: bool,
) -> None:
    """Put a snapshot's directories where they were; KEY is a fingerprint, its start, or a name.

    A directory that exists must be empty, or be as it was before the set-up. The snapshot says
    where it goes: that is printed first.
    """
    from bootseer.snapshots.restore import early_server

    if relocates and directory is None:
        raise click.UsageError("--relocate needs --to DIR.")
    if directory is not None and mode not in (None, "auto", "extract"):
        raise click.UsageError("--to extracts: it has no other --mode.")
    settings = current_settings()
    if mode is not None:
        settings = replace(settings, restore_mode=mode)
    with contextlib.ExitStack() as stack:
        # A mount waits for its server, which loads while we do.
        process = None if directory is not None else stack.enter_context(early_server(settings))
        from bootseer.snapshots.restore import restore_snapshot

        manifest = restore_snapshot(
            settings,
            key,
            directory,
            relocates=relocates,
            allows_system=allows_system,
            report=say,
            process=process,
        )
    if as_json:
        emit_json(summary(manifest))
    else:
        say(f"restored {manifest.file_count} files, {human_bytes(manifest.content_bytes)}")


@snapshot.command("list", epilog="Example: bootseer snapshot list --json")
@click.option(
    "--sort",
    type=click.Choice(("age", "size", "name", "targets")),
    default="age",
    show_default=True,
    help="Newest first, largest own part of the store first, or by text.",
)
@json_option
def list_(sort: str, as_json: bool) -> None:
    """List the snapshots in the store, with their sizes and ages."""
    from bootseer.base.shown import shown_age
    from bootseer.snapshots.catalogue import list_all

    with open_current_store() as store:
        manifests = [one for one in list_all(store) if not one.cache]
    # Stable: equal ones stay newest first.
    if sort == "size":
        manifests.sort(key=lambda manifest: -manifest.stored_bytes)
    elif sort == "name":
        manifests.sort(key=lambda manifest: (not manifest.name, manifest.name))
    elif sort == "targets":
        manifests.sort(key=lambda manifest: [target.path for target in manifest.targets])
    now_ns = time.time_ns()
    if as_json:
        emit_json([summary(manifest) for manifest in manifests])
        return
    emit_table(
        (
            *("key", "name", "targets", "files", "content"),
            *("stored", "with earlier", "set-up s", "created", "age"),
        ),
        (
            (
                manifest.fingerprint[:12],
                manifest.name,
                ", ".join(shown(target.path) for target in manifest.targets),
                manifest.file_count,
                human_bytes(manifest.content_bytes),
                human_bytes(manifest.stored_bytes),
                human_bytes(manifest.whole_bytes) if manifest.is_layered else "",
                f"{manifest.setup_ns / 1e9:.1f}",
                human_time(manifest.created_ns),
                shown_age(now_ns - manifest.created_ns),
            )
            for manifest in manifests
        ),
    )


@snapshot.command(epilog="Example: bootseer snapshot show 3f2a91 --files")
@click.argument("key")
@click.option("--files", is_flag=True, help="Every name in it, with mode, owner, size.")
@json_option
def show(key: str, files: bool, as_json: bool) -> None:
    """Show what a snapshot was made from and what it holds."""
    from bootseer.snapshots import catalogue

    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        trees = [catalogue.load_tree(store, target) for target in manifest.targets] if files else []
    document = _details(manifest)
    rows = [
        _file_row(target.path, path, tree.inode(number))
        for target, tree in zip(manifest.targets, trees, strict=False)
        for path, number in tree.walk()
    ]
    if as_json:
        if files:
            columns = ("path", "mode", "uid", "gid", "size_bytes", "mtime_ns", "link_target")
            document["files"] = [dict(zip(columns, row, strict=True)) for row in rows]
        emit_json(document)
        return
    emit_table(("part", "value"), document["parts"].items(), title=manifest.fingerprint)
    click.echo()
    emit_table(
        ("target", "kind", "files", "deleted", "content", "stored", "earlier blobs"),
        (
            (
                shown(target.path),
                "whole" if target.whole else "difference",
                target.file_count,
                len(target.deletions),
                human_bytes(target.content_bytes),
                human_bytes(target.blob.size_bytes),
                ", ".join(human_bytes(blob.size_bytes) for blob in target.earlier),
            )
            for target in manifest.targets
        ),
    )
    if sentence := manifest.outside.restored_sentence(manifest.node):
        say(sentence)
    if files:
        click.echo()
        emit_table(
            ("path", "mode", "uid", "gid", "size"),
            (
                (f"{row[0]} -> {row[6]}" if row[6] else row[0], stat.filemode(row[1]), *row[2:5])
                for row in rows
            ),
        )


def _file_row(target: bytes, path: bytes, inode: "Inode") -> tuple[Any, ...]:
    return (
        shown(target + b"/" + path if path else target),
        inode.mode,
        inode.uid,
        inode.gid,
        inode.size_bytes,
        inode.mtime_ns,
        shown(inode.link_target),
    )


def _details(manifest: "Manifest") -> dict[str, Any]:
    return {
        **summary(manifest),
        "outside": list(manifest.outside.paths),
        "parts": {part.name: part.value for part in manifest.parts},
        "targets": [
            {
                "path": shown(target.path),
                "whole": target.whole,
                "blob": target.blob.digest,
                "blob_bytes": target.blob.size_bytes,
                "earlier": [blob.digest for blob in target.earlier],
                "earlier_bytes": sum(blob.size_bytes for blob in target.earlier),
                "index": target.index.digest,
                "file_count": target.file_count,
                "content_bytes": target.content_bytes,
                "deletions": [shown(path) for path in target.deletions],
            }
            for target in manifest.targets
        ],
    }
