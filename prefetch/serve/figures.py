"""Figures of one mount, as `bootseer status`, the timeline and Prometheus show them. Pure."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from msgspec import Struct

from bootseer.base.documents import to_builtins
from bootseer.base.exposition import Family, Sample, single
from bootseer.base.exposition import render as render_families
from bootseer.prefetch.bundle.accuracy import BundleAccuracy
from bootseer.prefetch.bundle.replay import BundleReplay
from bootseer.prefetch.reading.faults import BUCKETS_S, FaultFigures, SourceFigures
from bootseer.transfer.chunks import FetchStatistics


class PrefetchFigures(Struct, frozen=True):
    """Replay and accuracy of a bundle. Bytes are uncompressed, but for `bundle_size_bytes`."""

    bundle: str | None
    """Digest of the bundle."""
    bundle_index: str | None
    """Index of the image that the bundle was made for, maybe an earlier build of this one."""
    bundle_size_bytes: int
    """Stored size of the bundle."""
    bundle_stream_bytes: int
    """Uncompressed size of the bundle."""
    fetched_stream_bytes: int
    """Bytes of the bundle that this start fetched."""
    remaining_frame_count: int
    finished_after_s: float | None
    """Duration of the replay; None unless it is complete."""
    error: str | None
    """Reason why the replay was given up."""
    asked_bytes: int
    """Bytes that the kernel read."""
    used_bytes: int
    """Bytes of the bundle that the kernel read."""
    wasted_bytes: int
    """Bytes of the bundle that the kernel did not read."""
    missed_bytes: int
    """Bytes that the kernel read and the bundle does not have."""
    precision: float | None
    recall: float | None


def prefetch_figures(
    replay: BundleReplay, accuracy: BundleAccuracy, *, bundle: str | None, bundle_index: str | None
) -> PrefetchFigures:
    """Return the figures of a replay and its bundle's accuracy."""
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
    """Figures of the background fill."""

    state: str
    """State of the fill (`reading.fill.Fill.state`); "off" if there is no fill."""
    bytes_per_s: int
    """Limit of its rate."""
    missing_bytes: int
    """Uncompressed bytes of the image that are not proven on this node."""


class LaunchFigures(Struct, frozen=True):
    """Figures of a mount at one moment."""

    image: str
    workload: str
    started_ns: int
    is_mounted: bool
    image_bytes: int
    cached_bytes: int
    cache_is_full: bool
    faults: FaultFigures
    sources: SourceFigures
    moved: FetchStatistics
    prefetch: PrefetchFigures | None
    fill: FillFigures


def status_of(figures: LaunchFigures) -> dict[str, Any]:
    """Return the figures for JSON, with the keys of `bootseer status`."""
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
    """Return the figures as attributes of the start's span (docs/format/timeline.md)."""
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
    """Return the figures for Prometheus. `slot` tells equal mounts apart."""
    own = (("image", figures.image), ("workload", figures.workload), ("slot", str(slot)))
    return render_families(_families(figures), own)


def _families(figures: LaunchFigures) -> Iterator[Family]:
    start_s, cached_bytes = figures.started_ns / 1e9, figures.cached_bytes
    for name, text, value in (
        ("mounted", "1 while the image is mounted, 0 after its end.", figures.is_mounted),
        ("start_time_seconds", "Time of the mount, in seconds since the epoch.", start_s),
        ("size_bytes", "Uncompressed size of the image.", figures.image_bytes),
        ("cached_bytes", "Uncompressed bytes of the image on this node.", cached_bytes),
    ):
        yield single(_PREFIX + name, "gauge", text, value)
    yield from _of_faults(figures.faults)
    sources = figures.sources
    yield Family(
        _PREFIX + "source_bytes_total",
        "counter",
        "Uncompressed bytes by source; cache: reads that found all bytes on this node.",
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
        ("fetches_total", "Requests that the store answered.", moved.fetch_count),
        ("fetch_retries_total", "Requests that failed and were repeated.", moved.retry_count),
        ("fetch_timeouts_total", "Requests that ended at their deadline.", moved.hung_count),
        ("corrupt_chunks_total", "Chunks that did not match their digest.", moved.corrupt_count),
    ):
        yield single(_PREFIX + name, "counter", text, value)
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
        "Waiting times of reads that found bytes missing.",
        [
            *buckets,
            Sample(faults.fault_wait_ns / 1e9, suffix="_sum"),
            Sample(faults.fault_count, suffix="_count"),
        ],
    )
    yield Family(
        _PREFIX + "fault_failures_total",
        "counter",
        "Reads that failed.",
        [Sample(faults.failed_count)],
    )


def _of_prefetch(figures: LaunchFigures) -> Iterator[Family]:
    prefetch = figures.prefetch
    if prefetch is None:
        return
    for name, text, value in (
        ("prefetch_bytes", "Uncompressed size of the bundle.", prefetch.bundle_stream_bytes),
        ("prefetch_used_bytes", "Bytes of the bundle that were read.", prefetch.used_bytes),
        ("prefetch_wasted_bytes", "Bytes of the bundle, not read.", prefetch.wasted_bytes),
        ("prefetch_missed_bytes", "Bytes read, not in the bundle.", prefetch.missed_bytes),
        ("prefetch_precision_ratio", "Share of the bundle that was read.", prefetch.precision),
        ("prefetch_recall_ratio", "Share of the read bytes in the bundle.", prefetch.recall),
        ("prefetch_seconds", "Duration of the bundle's replay.", prefetch.finished_after_s),
        ("prefetch_failed", "1 if the replay was given up.", prefetch.error is not None),
    ):
        if value is not None:
            yield single(_PREFIX + name, "gauge", text, value)
