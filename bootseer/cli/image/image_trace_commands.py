"""`bootseer image trace list | show`: what starts of a workload read, as it was recorded."""

from typing import Any

import click

from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import (
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    human_time,
    json_option,
    open_current_store,
)
from bootseer.errors import InvalidInputError, NotFoundError


@click.group(cls=LazyGroup)
def trace() -> None:
    """What starts of a workload read: recorded traces."""


@trace.command("list", epilog="Example: bootseer image trace list train:v1")
@click.argument("reference", metavar="REF")
@json_option
def trace_list(reference: str, as_json: bool) -> None:
    """List the traces of the image REF, of all workloads, and the bundles made from them."""
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image

    with open_current_store() as store:
        index = find_image(store, reference).index_digest
        found: list[dict[str, Any]] = []
        for workload in hot_store.workloads(store, index):
            pointer = hot_store.read_pointer(store, index, workload)
            for key in hot_store.trace_keys(store, index, workload):
                one = hot_store.read_trace(store, key)
                found.append(
                    {
                        "id": key.rpartition("/")[2],
                        "workload": workload,
                        "node": one.node,
                        "started_ns": one.started_ns,
                        "ended": one.ended,
                        "file_count": len(one.files),
                        "access_count": len(one.accesses),
                        "read_bytes": sum(access.length for access in one.accesses),
                        "bundle": pointer.bundle_digest if pointer else None,
                        "bundle_size_bytes": pointer.size_bytes if pointer else None,
                    }
                )
    if as_json:
        emit_json(found)
        return
    emit_table(
        ("trace", "workload", "node", "started", "ended by", "files", "reads", "read", "bundle"),
        (
            (
                one["id"][:12],
                one["workload"],
                one["node"],
                human_time(one["started_ns"]),
                one["ended"],
                one["file_count"],
                one["access_count"],
                human_bytes(one["read_bytes"]),
                "-" if one["bundle"] is None else human_bytes(one["bundle_size_bytes"]),
            )
            for one in found
        ),
    )


@trace.command("show", epilog="Example: bootseer image trace show train:v1 --workload train")
@click.argument("reference", metavar="REF")
@click.argument("identity", metavar="[TRACE]", required=False)
@click.option("--workload", metavar="NAME", help="Of this workload, not of the settings' one.")
@json_option
def trace_show(reference: str, identity: str | None, workload: str | None, as_json: bool) -> None:
    """Show what a start of the image REF read, in order: the newest trace, or the one whose name
    begins with TRACE."""
    from bootseer.prefetch.bundle import hot_store
    from bootseer.prefetch.index.catalogue import find_image

    settings = current_settings()
    workload = workload or settings.workload
    with open_current_store() as store:
        index = find_image(store, reference).index_digest
        keys = hot_store.trace_keys(store, index, workload)
        fitting = [key for key in keys if key.rpartition("/")[2].startswith(identity or "")]
        if not fitting:
            raise NotFoundError(
                f"{reference} has no such trace of the workload {workload!r}; see "
                "`bootseer image trace list`"
            )
        if identity and len(fitting) > 1:
            raise InvalidInputError(f"{identity} fits {len(fitting)} traces; write more of it")
        found = hot_store.read_trace(store, fitting[0])
    rows = [
        {
            "after_s": access.after_ns / 1e9,
            "is_ahead": access.is_preloaded,
            "offset": access.offset,
            "length": access.length,
            "path": found.files[access.file].path.decode("utf-8", "surrogateescape"),
        }
        for access in found.accesses
    ]
    if as_json:
        emit_json(
            {
                "id": fitting[0].rpartition("/")[2],
                "index": found.index_digest,
                "workload": found.workload,
                "node": found.node,
                "started_ns": found.started_ns,
                "ended": found.ended,
                "readahead_bytes": found.readahead_bytes,
                "accesses": rows,
            }
        )
        return
    emit_table(
        ("path", "after s", "offset", "length"),
        ((row["path"], f"{row['after_s']:.4f}", row["offset"], row["length"]) for row in rows),
    )
