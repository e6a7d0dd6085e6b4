"""A launch's figures for Prometheus (docs/operations.md). Pure."""

from collections.abc import Iterator
from itertools import accumulate

from bootseer.base.exposition import Family, Sample, one
from bootseer.base.exposition import render as render_families
from bootseer.prefetch.reading.fault_figures import BUCKETS_S, FaultFigures
from bootseer.prefetch.serve.launch_figures import LaunchFigures

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
