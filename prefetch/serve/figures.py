"""All figures of one launch: what `status`, the timeline and Prometheus show. Pure model."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from msgspec import Struct

from bootseer.base.documents import to_builtins
from bootseer.base.exposition import Family, Sample, one
from bootseer.base.exposition import render as render_families
from bootseer.prefetch.bundle.bundle_accuracy import BundleAccuracy
from bootseer.prefetch.bundle.replay import Replay
from bootseer.prefetch.reading.fault_figures import BUCKETS_S, FaultFigures, SourceFigures
from bootseer.transfer.figures import Statistics


class PrefetchFigures(Struct, frozen=True):
    """A bundle's way into the cache, and how well it met what was read. Bytes of streams are
    uncompressed."""

    bundle: str | None
    """Its digest."""
    bundle_index: str | None
    """The image that it was made for: maybe an earlier build of this one."""
    bundle_size_bytes: int
    """The stored size of the bundle."""
    bundle_stream_bytes: int
    fetched_stream_bytes: int
    """What this launch had to fetch of it."""
    remaining_frame_count: int
    finished_after_s: float | None
    """Seconds until the bundle was here; None while it comes, or when it was given up."""
    error: str | None
    """Why it was given up."""
    asked_bytes: int
    """What the kernel asked for."""
    used_bytes: int
    """Bytes that are in the bundle and were asked for."""
    wasted_bytes: int
    missed_bytes: int
    precision: float | None
    recall: float | None


def prefetch_figures(
    replay: Replay, accuracy: BundleAccuracy, *, bundle: str | None, bundle_index: str | None
) -> PrefetchFigures:
    """The figures of `replay`, which met what was read as `accuracy` says."""
    finished_ns = replay.finished_after_ns
    return PrefetchFigures(
        bundle=bundle,
        bundle_index=bundle_index,
        bundle_size_bytes=replay.bundle.size_bytes,
        bundle_stream_bytes=accuracy.bundle_bytes,
        fetched_stream_bytes=replay.fetched_bytes,
        remaining_frame_count=replay.remaining_count,
        finished_after_s=None if finished_ns is None else finished_ns / 1e9,
        error=replay.error,
        asked_bytes=accuracy.asked_bytes,
        used_bytes=accuracy.used_bytes,
        wasted_bytes=accuracy.bundle_bytes - accuracy.used_bytes,
        missed_bytes=accuracy.asked_bytes - accuracy.used_bytes,
        precision=accuracy.precision,
        recall=accuracy.recall,
    )


class FillFigures(Struct, frozen=True):
    """The background fill."""

    state: str
    """As `fill.Fill.state`; "off" where there is none."""
    bytes_per_s: int
    """Its cap."""
    missing_bytes: int
    """Uncompressed bytes of the image that are not here."""


class LaunchFigures(Struct, frozen=True):
    """One mount's figures, at one moment."""

    image: str
    workload: str
    started_ns: int
    is_mounted: bool
    image_bytes: int
    cached_bytes: int
    cache_is_full: bool
    faults: FaultFigures
    sources: SourceFigures
    moved: Statistics
    prefetch: PrefetchFigures | None
    fill: FillFigures


def status_of(figures: LaunchFigures) -> dict[str, Any]:
    """The figures as JSON values, under the keys of `status`."""
    faults = to_builtins(figures.faults)
    bounds = (*BUCKETS_S, None)
    faults["waits"] = [
        {"up_to_s": bound, "count": count}
        for bound, count in zip(bounds, faults.pop("wait_counts"), strict=True)
    ]
    return {
        "cached_bytes": figures.cached_bytes,
        "image_bytes": figures.image_bytes,
        "cache_is_full": figures.cache_is_full,
        "faults": faults,
        "sources": to_builtins(figures.sources),
        "moved": to_builtins(figures.moved),
        "prefetch": None if figures.prefetch is None else to_builtins(figures.prefetch),
        "fill": to_builtins(figures.fill),
    }


def span_attributes(figures: LaunchFigures) -> Mapping[str, str | int | float | bool]:
    """The figures of a start as attributes of its span (docs/format/timeline.md)."""
    faults, sources, prefetch = figures.faults, figures.sources, figures.prefetch
    found: dict[str, str | int | float | bool | None] = {
        "bootseer.bytes": figures.moved.fetched_bytes,
        "bootseer.hit": prefetch is not None,
        "bootseer.fault_count": faults.fault_count,
        "bootseer.fault_wait_s": faults.fault_wait_ns / 1e9,
        "bootseer.fault_p50_s": faults.wait_p50_ns / 1e9,
        "bootseer.fault_p99_s": faults.wait_p99_ns / 1e9,
        "bootseer.fault_max_s": faults.wait_max_ns / 1e9,
        "bootseer.cache_bytes": sources.cache_bytes,
        "bootseer.bundle_bytes": sources.bundle_bytes,
        "bootseer.fault_bytes": sources.fault_bytes,
        "bootseer.readahead_bytes": sources.readahead_bytes,
    }
    if prefetch is not None:
        found |= {
            "bootseer.prefetch_s": prefetch.finished_after_s,
            "bootseer.prefetched_bytes": prefetch.bundle_stream_bytes,
            "bootseer.used_bytes": prefetch.used_bytes,
            "bootseer.wasted_bytes": prefetch.wasted_bytes,
            "bootseer.missed_bytes": prefetch.missed_bytes,
            "bootseer.precision": prefetch.precision,
            "bootseer.recall": prefetch.recall,
        }
    return {name: value for name, value in found.items() if value is not None}


# ---- for Prometheus (docs/operations.md) --------------------------------------------------------

_PREFIX = "bootseer_image_"


def render(figures: LaunchFigures, slot: int) -> str:
    """The whole file; `slot` tells mounts of one image and workload apart that run at once."""
    own = (("image", figures.image), ("workload", figures.workload), ("slot", str(slot)))
    return render_families(_families(figures), own)


def _families(figures: LaunchFigures) -> Iterator[Family]:
    start_s, cached_bytes = figures.started_ns / 1e9, figures.cached_bytes
    for name, text, value in (
        ("mounted", "1 while the image is mounted, 0 after its end.", figures.is_mounted),
        ("start_time_seconds", "When the image was mounted, in seconds since the epoch.", start_s),
        ("size_bytes", "Size of the uncompressed image.", figures.image_bytes),
        ("cached_bytes", "How much of the uncompressed image is on this node.", cached_bytes),
    ):
        yield one(_PREFIX + name, "gauge", text, value)
    yield from _of_faults(figures.faults)
    sources = figures.sources
    yield Family(
        _PREFIX + "source_bytes_total",
        "counter",
        "Uncompressed bytes by what brought them; cache: reads that found all here.",
        [
            Sample(sources.cache_bytes, (("source", "cache"),)),
            Sample(sources.bundle_bytes, (("source", "bundle"),)),
            Sample(sources.fault_bytes, (("source", "fault"),)),
            Sample(sources.readahead_bytes, (("source", "readahead"),)),
            Sample(sources.fill_bytes, (("source", "fill"),)),
        ],
    )
    moved = figures.moved
    for name, text, value in (
        ("fetched_bytes_total", "Stored bytes fetched over the network.", moved.fetched_bytes),
        ("fetches_total", "Requests to the store that were answered.", moved.fetch_count),
        ("fetch_retries_total", "Requests that failed and were tried again.", moved.retry_count),
        ("fetch_timeouts_total", "Requests given up at their deadline.", moved.hung_count),
        ("corrupt_chunks_total", "Chunks that did not match their digest.", moved.corrupt_count),
    ):
        yield one(_PREFIX + name, "counter", text, value)
    yield from _of_prefetch(figures)


def _of_faults(faults: FaultFigures) -> Iterator[Family]:
    bounds = [*(repr(bound) for bound in BUCKETS_S), "+Inf"]
    buckets = [
        Sample(count, (("le", bound),), "_bucket")
        for bound, count in zip(bounds, accumulate(faults.wait_counts), strict=True)
    ]
    yield Family(
        _PREFIX + "fault_seconds",
        "histogram",
        "How long reads waited that found something missing.",
        [
            *buckets,
            Sample(faults.fault_wait_ns / 1e9, suffix="_sum"),
            Sample(faults.fault_count, suffix="_count"),
        ],
    )
    yield Family(
        _PREFIX + "fault_failures_total",
        "counter",
        "Reads that were answered with an error.",
        [Sample(faults.failed_count)],
    )


def _of_prefetch(figures: LaunchFigures) -> Iterator[Family]:
    prefetch = figures.prefetch
    if prefetch is None:
        return
    for name, text, value in (
        ("prefetch_bytes", "Uncompressed bytes of the bundle.", prefetch.bundle_stream_bytes),
        ("prefetch_used_bytes", "Of the bundle: read by the start.", prefetch.used_bytes),
        ("prefetch_wasted_bytes", "Of the bundle: not read.", prefetch.wasted_bytes),
        ("prefetch_missed_bytes", "Read by the start, not in the bundle.", prefetch.missed_bytes),
        ("prefetch_precision_ratio", "Share of the bundle that was read.", prefetch.precision),
        ("prefetch_recall_ratio", "Share of what was read that the bundle had.", prefetch.recall),
        ("prefetch_seconds", "Until all of the bundle was here.", prefetch.finished_after_s),
        ("prefetch_failed", "1 if the bundle was given up.", prefetch.error is not None),
    ):
        if value is not None:
            yield one(_PREFIX + name, "gauge", text, value)
