"""Tables of the figures of one mount, for `bootseer status DIR`."""

from collections.abc import Iterator, Mapping
from typing import Any

from bootseer.cli.show import emit_table
from bootseer.cli.text import human_bytes


def print_image_figures(one: Mapping[str, Any]) -> None:
    """Print the figures of a mounted image or environment: bytes by source, faults, prefetch.

    Precision is the share of the prefetched bytes that was used, recall the share of the bytes read
    that had been prefetched.
    """
    emit_table(("figure", "value"), _rows_of_image(one))


def print_checkpoint_figures(one: Mapping[str, Any]) -> None:
    """Print the figures of a mounted checkpoint folder: bytes, requests, memory, open files."""
    title = f"{one['url']} on {one['directory']}"
    counts, memory, now = one["statistics"], one["memory"], one["throughput"]

    def moved(name: str) -> str:
        total = human_bytes(counts[f"{name}_bytes"])
        return f"{human_bytes(int(now[f'{name}_bytes_per_s']))}/s now, {total} in all"

    rows = [
        ("server", f"process {one['worker_pid']} under {one['pid']}, up {one['uptime_s']:.0f} s"),
        ("to readers", moved("served")),
        ("from the storage", moved("fetched")),
        ("to the storage", moved("written")),
        ("requests", one["requests"]),
        (
            "reads",
            f"{counts['fetch_count']}, retried {counts['read_retry_count']}, "
            f"late {counts['late_count']} (second answer first: {counts['late_won_count']}), "
            f"given up {counts['stuck_count']}, wrong checksum {counts['corrupt_count']}",
        ),
        (
            "writes",
            f"{counts['write_count']}, retried {counts['write_retry_count']}, "
            f"files finished {counts['published_count']}",
        ),
        (
            "memory",
            f"{human_bytes(memory['used_bytes'])} of {human_bytes(memory['limit_bytes'])}, "
            f"at most {human_bytes(memory['peak_bytes'])}",
        ),
        ("open", f"{one['files_open']} files, {one['streams_active']} sequential streams"),
        *(("unfinished", path) for path in one["unfinished"]),
        *(("error", error["message"]) for error in one["errors"]),
    ]
    emit_table(("", ""), rows, title=title)
    sources = counts["sources"]
    if sources:
        emit_table(
            ("place", "read bytes", "reads count", "late count", "written bytes"),
            (
                (
                    source["name"],
                    human_bytes(source["read_bytes"]),
                    source["read_count"],
                    source["late_count"],
                    human_bytes(source["written_bytes"]),
                )
                for source in sources
            ),
        )


def _rows_of_image(one: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def _of_prefetch(prefetch: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
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
