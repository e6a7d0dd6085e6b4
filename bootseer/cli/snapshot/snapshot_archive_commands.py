"""`bootseer snapshot export`, `import` and `fetch`: snapshots as plain archives, for and from other
tools, and one in this node's cache.

The group `snapshot` is in `snapshot_commands`.
"""

from pathlib import Path

import click

from bootseer.cli.output import (
    current_settings,
    emit_json,
    human_bytes,
    json_option,
    open_current_store,
    say,
)
from bootseer.cli.snapshot.snapshot_output import summary


@click.command(epilog="Example: bootseer snapshot export base-env base-env.tar.zst")
@click.argument("key")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def export(key: str, file: Path, as_json: bool) -> None:
    """Write a snapshot to FILE, a tar.zst that `tar --zstd -x` unpacks.

    The names of one whole directory are relative to it. Those of several directories, or of what a
    set-up changed in them, are absolute without the leading "/"; what it removed is not in it.
    """
    from bootseer.base.progress import Progress
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.archive import export_snapshot, is_plain

    if str(file) == "-":
        raise click.UsageError("FILE is the name of a file; nothing is exported to stdout.")

    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        total = sum(blob.size_bytes for one in manifest.targets for blob in one.blobs)
        with Progress("exporting", total) as progress:
            size_bytes = export_snapshot(store, manifest, file, progress.advance)
    deleted = sum(len(target.deletions) for target in manifest.targets)
    if deleted:
        say(f"warning: {deleted} names that the set-up removed are not in the archive")
    if as_json:
        emit_json(
            {
                "fingerprint": manifest.fingerprint,
                "file": str(file),
                "size_bytes": size_bytes,
                "relative_to": summary(manifest)["targets"][0] if is_plain(manifest) else "/",
                "left_out_deletions": deleted,
            }
        )
    else:
        say(f"wrote {manifest.file_count} files, {human_bytes(size_bytes)}, to {file}")


@click.command(
    "import", epilog="Example: bootseer snapshot import env.tar.gz --target /opt/env --name env"
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--target", metavar="DIR", required=True, help="The directory that it is restored to."
)
@click.option("--name", metavar="NAME", default="", help="A name for `restore` and `show`.")
@json_option
def import_(file: Path, target: str, name: str, as_json: bool) -> None:
    """Make a snapshot of what FILE holds: a tar, tar.gz or tar.zst, with names relative to DIR.

    The archive may come from anywhere, for example `conda-pack`. DIR need not exist here, and is
    not touched.
    """
    from bootseer.base.progress import Progress
    from bootseer.snapshots.archive import import_archive

    total = file.stat().st_size if file.is_file() else None
    with open_current_store() as store, Progress("importing", total) as progress:
        manifest = import_archive(current_settings(), store, file, target, name, progress.advance)
    if as_json:
        emit_json(summary(manifest))
    else:
        click.echo(manifest.fingerprint)
        say(
            f"stored {manifest.file_count} files, {human_bytes(manifest.content_bytes)}, "
            f"as {human_bytes(manifest.stored_bytes)}"
        )


@click.command(epilog="Example: bootseer snapshot fetch base-env")
@click.argument("key")
@json_option
def fetch(key: str, as_json: bool) -> None:
    """Bring all of a snapshot into this node's cache, for later mounts of it.

    KEY is a fingerprint, its start, or a name.
    """
    from bootseer.prefetch.reading.fill import fetch_tree
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.mounted import have_index, name_of

    settings = current_settings()
    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        for target in manifest.targets:
            have_index(settings, store, target)
            fetch_tree(settings, store, target.index.digest, name_of(target.path))
    if as_json:
        emit_json(summary(manifest))
