"""`bootseer image status`: what is mounted on this node, and how its start went."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bootseer.cli.output import (
    Seconds,
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
)
from bootseer.errors import BootseerError, DeadlineError


@click.command(epilog="Example: bootseer image status /mnt/train --json")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(0, 86_400),
    metavar="TIME",
    help="First wait, at most so long, until publishing is over.",
)
@json_option
def status(directory: Path | None, wait_s: float | None, as_json: bool) -> None:
    """Show what is mounted, what was fetched ahead, and how well that met what was read.

    With DIR its figures at length; with --json all figures of each mount. Precision is the share of
    the prefetched bytes that was used, recall the share of the bytes read that had been prefetched.
    """
    from bootseer.linux import mount_table
    from bootseer.prefetch.publish.publishing import wait_published
    from bootseer.prefetch.resolve.mount import find_live_mount
    from bootseer.served.status import IMAGES, known_servers

    settings = current_settings()
    if wait_s is not None and not wait_published(settings, wait_s):
        raise DeadlineError(f"a record was still being published after {wait_s:g} s")
    found = [one for one in known_servers(settings.run_dir) if one.kind in IMAGES]
    if directory is not None:
        path = str(mount_table.absolute(directory))
        found = [one for one in found if one.state.directory == path]
        if not found:
            find_live_mount(settings, directory)  # says that there is none
    statuses: list[dict[str, Any]] = []
    for one in sorted(found, key=lambda one: not one.is_running):
        path = one.state.directory
        reason = f"its server died; `bootseer image unmount {path}` removes it"
        try:
            statuses.append(one.ask("status") if one.is_running else {"error": reason})
        except BootseerError as error:
            statuses.append({"error": str(error)})
        if "error" in statuses[-1]:
            statuses[-1] = {"directory": path, **statuses[-1]}
    if as_json:
        emit_json(statuses)
    elif directory is not None and found and "error" not in statuses[0]:
        emit_table(("figure", "value"), _at_length(statuses[0]))
    else:
        emit_table(
            (
                "directory",
                "image",
                "workload",
                "moved",
                "faults",
                "p99",
                "precision",
                "recall",
                "here",
                "record",
            ),
            (_row(one) for one in statuses),
        )


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    if "error" in one:
        return (one["directory"], one["error"], *[""] * 8)
    prefetch, faults = one["prefetch"] or {}, one["faults"]
    return (
        one["directory"],
        one["reference"],
        one["workload"],
        human_bytes(one["moved"]["fetched_bytes"]),
        str(faults["fault_count"]),
        _wait(faults["wait_p99_ns"]) if faults["fault_count"] else "-",
        _percent(prefetch.get("precision")),
        _percent(prefetch.get("recall")),
        _percent(one["cached_bytes"] / one["image_bytes"] if one["image_bytes"] else None),
        one["record"],
    )


def _at_length(one: dict[str, Any]) -> Iterator[tuple[str, str]]:
    faults, sources, moved, fill = one["faults"], one["sources"], one["moved"], one["fill"]
    yield "directory", one["directory"]
    yield "image", one["reference"]
    yield "workload", one["workload"]
    yield "record", one["record"]
    yield "here", f"{human_bytes(one['cached_bytes'])} of {human_bytes(one['image_bytes'])}"
    yield "fetched", f"{human_bytes(moved['fetched_bytes'])} in {moved['fetch_count']} requests"
    yield "failed requests", f"{moved['retry_count']} tried again, {moved['failed_count']} given up"
    for name in ("bundle", "fault", "readahead", "fill", "cache"):
        yield f"from {name}", human_bytes(sources[f"{name}_bytes"])
    yield "faults", f"{faults['fault_count']}, {faults['failed_count']} of them failed"
    if faults["fault_count"]:
        names = ("wait_p50_ns", "wait_p99_ns", "wait_max_ns")
        median, high, longest = (_wait(faults[name]) for name in names)
        yield "waits", f"median {median}, p99 {high}, longest {longest}"
        for bucket in faults["waits"]:
            if bucket["count"]:
                bound = bucket["up_to_s"]
                name = "longer" if bound is None else f"up to {_wait(bound * 1e9)}"
                yield f"  {name}", str(bucket["count"])
    yield from _of_prefetch(one["prefetch"])
    rate = f", {human_bytes(fill['bytes_per_s'])}/s" if fill["bytes_per_s"] else ""
    yield "fill", f"{fill['state']}{rate}, {human_bytes(fill['missing_bytes'])} missing"


def _of_prefetch(prefetch: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if prefetch is None:
        yield "bundle", "none"
        return
    if prefetch["error"]:
        yield "bundle", f"given up: {prefetch['error']}"
    elif prefetch["finished_after_s"] is None:
        yield "bundle", f"{prefetch['remaining_frame_count']} frames to come"
    else:
        yield "bundle", f"here after {_wait(prefetch['finished_after_s'] * 1e9)}"
    yield "prefetched", human_bytes(prefetch["bundle_stream_bytes"])
    yield "used", f"{human_bytes(prefetch['used_bytes'])}, {_percent(prefetch['precision'])}"
    yield "wasted", human_bytes(prefetch["wasted_bytes"])
    yield (
        "missed",
        f"{human_bytes(prefetch['missed_bytes'])}, recall {_percent(prefetch['recall'])}",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _wait(time_ns: float) -> str:
    return f"{time_ns / 1e6:.3g} ms" if time_ns < 1e9 else f"{time_ns / 1e9:.3g} s"
