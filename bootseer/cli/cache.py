"""`bootseer cache`: caches of compilers and frameworks, kept between starts."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from bootseer.base.display import display_path, format_age
from bootseer.cli.command_tree import WrappingCommand, command, current_settings
from bootseer.cli.options import open_current_store
from bootseer.cli.show import document_of, emit_records, emit_table, shows
from bootseer.cli.text import human_bytes, say
from bootseer.launch.caches.records import CacheRecord

if TYPE_CHECKING:
    from bootseer.launch.caches.finding import CacheJob, KeepRequest
    from bootseer.snapshots.manifest import Manifest


class Generation(Struct):
    """Newest generation of a kept cache in the store."""

    key: str
    """Digest of everything that decides whether the files can be used."""
    cache: str
    """Variable that names the cache, or its folder."""
    folder: str
    """Path at which jobs see it."""
    file_count: int
    """Names in it, directories included."""
    content_bytes: int
    stored_bytes: int
    """Size in the store, with the blobs that it shares with the generation before."""
    created_ns: int
    node: str
    """Node that published it."""


class ListedCache(Struct):
    """Kept cache that the store has, or that only this node knows of."""

    key: str
    cache: str
    generation: Generation | None
    """Newest generation in the store."""
    here: CacheRecord | None
    """Record of this node."""


class CacheDifference(Struct):
    """Part of a key that differs from the nearest kept cache."""

    part: str
    there: str | None
    here: str | None


class ExplainedCache(Struct):
    """Cache of the command: whether the store has it, and why not."""

    cache: str
    key: str
    folder: str
    """Path at which the command sees it."""
    hit: bool
    """Whether the store has it."""
    reason: str
    parts: dict[str, str]
    """Parts of the key, by name."""
    here: CacheRecord | None
    nearest: str | None
    """Key of the cache of that name that differs least, after a miss."""
    differences: list[CacheDifference]


_KEEP = click.option(
    "--keep", "kept", metavar="DIR", multiple=True, help="Directory that `run --keep` keeps."
)


def _show_list(found: list[ListedCache]) -> None:
    emit_table(
        ("key", "cache", "files", "content", "stored", "by", "age", "hits", "here"),
        map(_cells, found),
    )


def _cells(one: ListedCache) -> tuple[object, ...]:
    stored: tuple[object, ...] = ("-",) * 5
    if newest := one.generation:
        sizes = human_bytes(newest.content_bytes), human_bytes(newest.stored_bytes)
        age = format_age(time.time_ns() - newest.created_ns)
        stored = (newest.file_count, *sizes, newest.node, age)
    last = one.here.last if one.here else ""
    return (one.key[:12], one.cache, *stored, _rate(one.here), last)


def _rate(here: CacheRecord | None) -> str:
    if here is None or not here.hits + here.misses:
        return "-"
    return f"{here.hits} of {here.hits + here.misses}"


@command("cache list", epilog="Example: bootseer cache list")
@shows(list[ListedCache], text=_show_list)
def cache_list() -> list[ListedCache]:
    """List the kept caches of the store and of this node, with the hits of this node."""
    from bootseer.launch.caches.commands import list_caches

    with open_current_store() as store:
        return [
            ListedCache(
                one.key,
                one.name,
                _generation(one.generation) if one.generation else None,
                one.record,
            )
            for one in list_caches(current_settings(), store)
        ]


def _show_explained(found: list[ExplainedCache]) -> None:
    if not found:
        say("there is nothing to keep: no package of a known framework, and no --keep DIR")
        return
    emit_table(
        ("cache", "key", "", "why", "folder"),
        (
            (one.cache, one.key[:12], "hit" if one.hit else "miss", one.reason, one.folder)
            for one in found
        ),
    )
    for one in found:
        if one.differences:
            click.echo()
            title = f"{one.cache}: differences from the nearest kept cache"
            emit_records(one.differences, "part", "there", "here", title=title)


@command(
    "cache explain",
    cls=WrappingCommand,
    epilog="Example: bootseer cache explain -- torchrun train.py",
)
@_KEEP
@shows(list[ExplainedCache], text=_show_explained)
def cache_explain(kept: tuple[str, ...], command: tuple[str, ...]) -> list[ExplainedCache]:
    """List the caches that `bootseer run -- COMMAND` would find here, and explain each miss.

    Nothing is run, changed or restored. Changes by a set-up or an image are not considered.
    """
    from bootseer.launch.caches import commands

    wish, job = _job(kept, command)
    with open_current_store() as store:
        found = commands.explain(current_settings(), store, wish, job)
    return [
        ExplainedCache(
            cache=one.cache.name,
            key=one.cache.key,
            folder=one.cache.path,
            hit=one.generation is not None,
            reason=one.reason,
            parts={part.name: part.value for part in one.cache.parts},
            here=one.record,
            nearest=one.nearest.fingerprint if one.nearest else None,
            differences=[CacheDifference(d.part, d.stored, d.now) for d in one.differences],
        )
        for one in found
    ]


@command(
    "cache import",
    cls=WrappingCommand,
    epilog="Example: bootseer cache import inductor.tar.zst TORCHINDUCTOR_CACHE_DIR -- "
    "python train.py",
)
@_KEEP
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name")
@shows(Generation, text=lambda done: click.echo(done.key))
def cache_import(
    kept: tuple[str, ...], file: Path, name: str, command: tuple[str, ...]
) -> Generation:
    """Make FILE, a tar, tar.gz or tar.zst, the newest generation of the cache NAME of COMMAND.

    The key is that of this host, as `cache explain` prints it: the files must have been made for
    such hosts, which is not checked.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.launch.caches.commands import import_cache

    wish, job = _job(kept, command)
    total = file.stat().st_size if file.is_file() else None
    with open_current_store() as store, ProgressBar("importing", total) as progress:
        return _generation(
            import_cache(current_settings(), store, file, name, wish, job, progress.advance)
        )


@command("cache delete", epilog="Example: bootseer cache delete 3f2a91")
@click.argument("key")
@shows(Generation, text=lambda done: say(f"deleted the cache {done.cache}, {done.key[:12]}"))
def cache_delete(key: str) -> Generation:
    """Delete a cache from the store: the next start makes a new one. `gc` frees the space."""
    from bootseer.launch.caches import commands

    with open_current_store() as store:
        return _generation(commands.delete(store, key))


def _job(kept: tuple[str, ...], command: tuple[str, ...]) -> "tuple[KeepRequest, CacheJob]":
    from bootseer.launch.caches.finding import CacheJob, KeepRequest

    return KeepRequest(kept), CacheJob(command, os.environ)


def _generation(manifest: "Manifest") -> Generation:
    return document_of(
        Generation,
        manifest,
        key=manifest.fingerprint,
        folder=display_path(manifest.targets[0].path),
        stored_bytes=manifest.whole_bytes,
    )
