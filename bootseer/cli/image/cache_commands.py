"""`bootseer image cache`: what this node keeps of images."""

from typing import Any

import click

from bootseer.cli.output import (
    Size,
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
)


@click.command(epilog="Example: bootseer image cache --trim 50GB")
@click.option(
    "--trim",
    "trim_bytes",
    type=Size(),
    metavar="SIZE",
    help="First remove what was not used for longest, until the rest is within SIZE.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="First compare contents and indexes with their checksums; damaged ones are fetched again.",
)
@json_option
def cache(trim_bytes: int | None, verify: bool, as_json: bool) -> None:
    """Show what this node keeps of images, the longest unused first.

    What is mounted or on its way in is never removed. Servers of images keep the cache within
    the setting cache_limit by themselves.
    """
    from bootseer.prefetch.cache.indexes import recheck_indexes
    from bootseer.prefetch.cache.limit import CacheRoom, folders
    from bootseer.prefetch.cache.node_cache import STREAMS, NodeCache

    settings = current_settings()
    node = NodeCache(settings.cache_dir)
    if trim_bytes is not None:
        CacheRoom(settings.cache_dir, trim_bytes).make()
    damaged_bytes = None
    if verify:
        damaged_bytes = recheck_indexes(settings.cache_dir)
        damaged_bytes += sum(node.recheck(stream.key) for stream in node.streams())
    streams: list[dict[str, Any]] = []
    for stream in node.streams():
        found = node.details(stream.key)
        streams.append(
            {
                "digest": stream.key,
                "size_bytes": stream.size_bytes,
                "stream_bytes": found.stream_length if found else None,
                "present_bytes": found.present_bytes if found else None,
                "used_ns": stream.used_ns,
                "is_used": found is not None and found.is_used,
            }
        )
    kept = [one for one in folders(settings.cache_dir) if one.counts]
    if as_json:
        emit_json(
            {
                "limit_bytes": settings.cache_limit_bytes,
                "size_bytes": sum(one.size_bytes for one in kept),
                "folders": {one.name: one.size_bytes for one in kept},
                "damaged_bytes": damaged_bytes,
                "streams": streams,
            }
        )
        return
    if damaged_bytes is not None:
        click.echo(f"damaged: {human_bytes(damaged_bytes)}", err=True)
    emit_table(("stream", "on disk", "here", "last used", "in use"), map(_row, streams))
    rest = [one for one in kept if one.name != STREAMS]
    if rest:
        emit_table(("beside them", "on disk"), ((o.name, human_bytes(o.size_bytes)) for o in rest))


def _row(stream: dict[str, Any]) -> tuple[str, ...]:
    whole, present = stream["stream_bytes"], stream["present_bytes"]
    return (
        stream["digest"][:19],
        human_bytes(stream["size_bytes"]),
        f"{present / whole:.0%}" if whole else "-",
        human_time(stream["used_ns"]),
        "yes" if stream["is_used"] else "",
    )
