"""`bootseer cache`: what compilers and frameworks made, kept between starts."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.base.shown import shown
from bootseer.cli.lazy_group import LazyGroup, WrappingCommand
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

if TYPE_CHECKING:
    from bootseer.launch.caches.commands import Explained, Listed
    from bootseer.launch.caches.finding import Job, Wish
    from bootseer.launch.caches.records import Record
    from bootseer.snapshots.manifest import Manifest

_KEEP = click.option(
    "--keep", "kept", metavar="DIR", multiple=True, help="A directory that `run --keep` keeps."
)


@click.group(cls=LazyGroup)
def cache() -> None:
    """Caches of compilers and frameworks, kept between starts.

    `bootseer run` restores them before its command and publishes what is new behind it.
    """


@cache.command("list", epilog="Example: bootseer cache list")
@json_option
def list_(as_json: bool) -> None:
    """List the kept caches: what the store has, and how often this node found it."""
    from bootseer.base.shown import shown_age
    from bootseer.launch.caches.commands import list_caches

    with open_current_store() as store:
        found = list(list_caches(current_settings(), store))
    if as_json:
        emit_json([_listed(one) for one in found])
        return
    now_ns = time.time_ns()
    emit_table(
        ("key", "cache", "files", "content", "stored", "by", "age", "hits", "here"),
        (
            (
                one.key[:12],
                one.name,
                one.generation.file_count if one.generation else "-",
                human_bytes(one.generation.content_bytes) if one.generation else "-",
                human_bytes(one.generation.whole_bytes) if one.generation else "-",
                one.generation.node if one.generation else "-",
                shown_age(now_ns - one.generation.created_ns) if one.generation else "-",
                _rate(one.record),
                one.record.last if one.record else "",
            )
            for one in found
        ),
    )


@cache.command(epilog="Example: bootseer cache show 3f2a91")
@click.argument("key")
@click.option("--files", is_flag=True, help="Every name in it, with its size.")
@json_option
def show(key: str, files: bool, as_json: bool) -> None:
    """Show what decides whether a cache is of use, and what it holds."""
    from bootseer.launch.caches.commands import find_generation
    from bootseer.launch.caches.records import read_record
    from bootseer.launch.caches.restoring import tree_files
    from bootseer.snapshots.catalogue import load_tree

    with open_current_store() as store:
        manifest = find_generation(store, key)
        names = tree_files(load_tree(store, manifest.targets[0])) if files else {}
    document = _generation(manifest) | {
        "parts": {part.name: part.value for part in manifest.parts},
        "here": _record(read_record(current_settings().cache_dir, manifest.fingerprint)),
    }
    if as_json:
        if files:
            document["files"] = [
                {"path": shown(path), "size_bytes": size} for path, size in names.items()
            ]
        emit_json(document)
        return
    emit_table(("part", "value"), document["parts"].items(), title=manifest.fingerprint)
    click.echo()
    emit_table(
        ("files", "content", "stored", "by", "created"),
        [
            (
                manifest.file_count,
                human_bytes(manifest.content_bytes),
                human_bytes(manifest.whole_bytes),
                manifest.node,
                human_time(manifest.created_ns),
            )
        ],
    )
    if files:
        click.echo()
        emit_table(("path", "size"), ((shown(path), size) for path, size in names.items()))


@cache.command(cls=WrappingCommand, epilog="Example: bootseer cache explain -- torchrun train.py")
@_KEEP
@json_option
def explain(kept: tuple[str, ...], command: tuple[str, ...], as_json: bool) -> None:
    """Say which caches `bootseer run -- COMMAND` would have on this host, and why a miss is one.

    Nothing is run, changed or restored. What a set-up or an image would change is not known.
    """
    from bootseer.launch.caches import commands

    settings = current_settings()
    wish, job = _job(kept, command)
    with open_current_store() as store:
        found = commands.explain(settings, store, wish, job)
    if as_json:
        emit_json([_explained(one) for one in found])
        return
    if not found:
        say("there is nothing to keep: no package of a known framework, and no --keep DIR")
        return
    emit_table(
        ("cache", "key", "", "why", "folder"),
        (
            (
                one.cache.name,
                one.cache.key[:12],
                "hit" if one.generation else "miss",
                one.reason,
                one.cache.path,
            )
            for one in found
        ),
    )
    for one in found:
        if one.differences:
            click.echo()
            emit_table(
                ("part", "there", "here"),
                ((d.part, d.stored or "-", d.now or "-") for d in one.differences),
                title=f"{one.cache.name}: what the nearest has otherwise",
            )


@cache.command(epilog="Example: bootseer cache export 3f2a91 inductor.tar.zst")
@click.argument("key")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def export(key: str, file: Path, as_json: bool) -> None:
    """Write a cache to FILE, a tar.zst with names relative to the cache's folder."""
    from bootseer.base.progress import Progress
    from bootseer.launch.caches.commands import find_generation
    from bootseer.snapshots.archive import export_snapshot

    with open_current_store() as store:
        manifest = find_generation(store, key)
        with Progress("exporting", manifest.whole_bytes) as progress:
            size_bytes = export_snapshot(store, manifest, file, progress.advance)
    if as_json:
        emit_json(_generation(manifest) | {"file": str(file), "size_bytes": size_bytes})
    else:
        say(f"wrote {manifest.file_count} names, {human_bytes(size_bytes)}, to {file}")


@cache.command(
    "import",
    cls=WrappingCommand,
    epilog="Example: bootseer cache import inductor.tar.zst TORCHINDUCTOR_CACHE_DIR -- "
    "python train.py",
)
@_KEEP
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name")
@json_option
def import_(
    kept: tuple[str, ...], file: Path, name: str, command: tuple[str, ...], as_json: bool
) -> None:
    """Make FILE, a tar, tar.gz or tar.zst, the newest generation of the cache NAME of COMMAND.

    The key is that of this host, as `cache explain` prints it: you vouch for it that the files
    were made for such hosts.
    """
    from bootseer.base.progress import Progress
    from bootseer.launch.caches.commands import import_cache

    wish, job = _job(kept, command)
    total = file.stat().st_size if file.is_file() else None
    with open_current_store() as store, Progress("importing", total) as progress:
        manifest = import_cache(current_settings(), store, file, name, wish, job, progress.advance)
    if as_json:
        emit_json(_generation(manifest))
    else:
        click.echo(manifest.fingerprint)


@cache.command(epilog="Example: bootseer cache delete 3f2a91")
@click.argument("key")
@json_option
def delete(key: str, as_json: bool) -> None:
    """Take a cache out of the store: the next start makes it anew. `store gc` frees the room."""
    from bootseer.launch.caches import commands

    with open_current_store() as store:
        manifest = commands.delete(store, key)
    if as_json:
        emit_json(_generation(manifest))
    else:
        say(f"deleted the cache {manifest.cache}, {manifest.fingerprint[:12]}")


def _job(kept: tuple[str, ...], command: tuple[str, ...]) -> "tuple[Wish, Job]":
    from bootseer.launch.caches.finding import Job, Wish

    return Wish(kept), Job(command, os.environ)


def _rate(record: "Record | None") -> str:
    if record is None or not record.hits + record.misses:
        return "-"
    return f"{record.hits} of {record.hits + record.misses}"


def _generation(manifest: "Manifest") -> dict[str, Any]:
    return {
        "key": manifest.fingerprint,
        "cache": manifest.cache,
        "folder": shown(manifest.targets[0].path),
        "file_count": manifest.file_count,
        "content_bytes": manifest.content_bytes,
        "stored_bytes": manifest.whole_bytes,
        "created_ns": manifest.created_ns,
        "node": manifest.node,
    }


def _record(record: "Record | None") -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "folder": record.folder,
        "hits": record.hits,
        "misses": record.misses,
        "restored_files": record.restored_files,
        "new_files": record.new_files,
        "used_ns": record.used_ns,
        "last": record.last,
    }


def _listed(one: "Listed") -> dict[str, Any]:
    return {
        "key": one.key,
        "cache": one.name,
        "generation": _generation(one.generation) if one.generation else None,
        "here": _record(one.record),
    }


def _explained(one: "Explained") -> dict[str, Any]:
    return {
        "cache": one.cache.name,
        "key": one.cache.key,
        "folder": one.cache.path,
        "hit": one.generation is not None,
        "reason": one.reason,
        "parts": {part.name: part.value for part in one.cache.parts},
        "here": _record(one.record),
        "nearest": one.nearest.fingerprint if one.nearest else None,
        "differences": [
            {"part": d.part, "there": d.stored, "here": d.now} for d in one.differences
        ],
    }
