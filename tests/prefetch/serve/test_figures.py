"""Figures of a launch: read by Prometheus' parser, and files that come and go."""

import os
import stat
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from bootseer.prefetch.reading.faults import BUCKETS_S, FaultRecorder
from bootseer.prefetch.serve.figures import (
    FillFigures,
    LaunchFigures,
    PrefetchFigures,
    render,
    span_attributes,
    status_of,
)
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.transfer.chunks import FetchCounters, percentile


def figures_of(recorder: FaultRecorder, image: str = "train:v1") -> LaunchFigures:
    moved = FetchCounters()
    moved.fetch_count, moved.fetched_bytes, moved.retry_count = 3, 5000, 1
    prefetch = PrefetchFigures(
        bundle="sha256:00",
        bundle_index="sha256:11",
        bundle_size_bytes=400,
        bundle_stream_bytes=1000,
        fetched_stream_bytes=900,
        remaining_frame_count=0,
        finished_after_s=0.25,
        error=None,
        asked_bytes=1600,
        used_bytes=800,
        wasted_bytes=200,
        missed_bytes=800,
        precision=0.8,
        recall=0.5,
    )
    return LaunchFigures(
        image=image,
        workload="train",
        started_ns=1_700_000_000_500_000_000,
        is_mounted=True,
        image_bytes=10_000,
        cached_bytes=4000,
        cache_is_full=False,
        faults=recorder.snapshot(),
        sources=recorder.sources(900),
        moved=moved.snapshot(),
        prefetch=prefetch,
        fill=FillFigures("waiting", 5_000_000, 6000),
    )


@pytest.fixture
def recorder() -> FaultRecorder:
    one = FaultRecorder()
    for wait_ns in (100_000, 500_000, 3_000_000, 40_000_000_000):
        one.fault(wait_ns, failed=wait_ns > 10**10)
    one.hit(4096)
    one.received(fault=300, readahead=200)
    return one


def write(file: FiguresFile, figures: LaunchFigures) -> None:
    file.write(file_name("image", figures.image, figures.workload), lambda n: render(figures, n))


def samples_of(text: str) -> dict[tuple[str, str], float]:
    """Return the value of each sample by its name and distinguishing label."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[sample.name, sample.labels.get("le") or sample.labels.get("source", "")] = (
                sample.value
            )
    return found


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 0.5) == 0
    assert percentile([7], 0.99) == 7
    assert percentile(list(range(100)), 0.5) == 50
    assert percentile(list(range(100)), 0.99) == 99


def test_prometheus_reads_it(recorder: FaultRecorder) -> None:
    text = render(figures_of(recorder), 0)
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["bootseer_image_fault_seconds"] == "histogram"
    assert kinds["bootseer_image_fetched_bytes"] == "counter"
    assert kinds["bootseer_image_prefetch_recall_ratio"] == "gauge"
    assert all(name.startswith("bootseer_image_") for name in kinds)
    found = samples_of(text)
    assert found["bootseer_image_mounted", ""] == 1
    assert found["bootseer_image_start_time_seconds", ""] == 1_700_000_000.5
    assert found["bootseer_image_source_bytes_total", "cache"] == 4096
    assert found["bootseer_image_source_bytes_total", "bundle"] == 900
    assert found["bootseer_image_source_bytes_total", "fault"] == 300
    assert found["bootseer_image_fetched_bytes_total", ""] == 5000
    assert found["bootseer_image_prefetch_wasted_bytes", ""] == 200
    assert found["bootseer_image_fault_failures_total", ""] == 1


def test_the_histogram_is_cumulative(recorder: FaultRecorder) -> None:
    found = samples_of(render(figures_of(recorder), 0))
    name = "bootseer_image_fault_seconds_bucket"
    assert found[name, "0.0005"] == 2
    assert found[name, "0.001"] == 2
    assert found[name, "0.005"] == 3
    assert found[name, "10.0"] == 3
    assert found[name, "+Inf"] == found["bootseer_image_fault_seconds_count", ""] == 4
    assert found["bootseer_image_fault_seconds_sum", ""] == pytest.approx(40.0036)


def test_labels_are_escaped(recorder: FaultRecorder) -> None:
    image = 'a"b\\c\nd\udcff{}'
    text = render(figures_of(recorder, image), 3)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["image"] == 'a"b\\c\nd?{}'
            assert sample.labels["workload"] == "train"
            assert sample.labels["slot"] == "3"


def test_without_a_bundle_there_are_no_figures_of_one(recorder: FaultRecorder) -> None:
    figures = replace(figures_of(recorder), prefetch=None)
    assert "prefetch" not in render(figures, 0)
    assert "bootseer.recall" not in span_attributes(figures)
    assert status_of(figures)["prefetch"] is None


def test_status_and_span_have_the_same_numbers(recorder: FaultRecorder) -> None:
    figures = figures_of(recorder)
    status, span = status_of(figures), span_attributes(figures)
    assert len(status["faults"]["waits"]) == len(BUCKETS_S) + 1
    assert sum(one["count"] for one in status["faults"]["waits"]) == 4
    assert span["bootseer.recall"] == status["prefetch"]["recall"] == 0.5
    assert span["bootseer.fault_max_s"] == 40.0
    assert span["bootseer.bundle_bytes"] == status["sources"]["bundle_bytes"] == 900


def test_files_are_readable_for_all_and_kept_for_a_while(
    tmp_path: Path, recorder: FaultRecorder
) -> None:
    folder = tmp_path / "metrics"
    figures = figures_of(recorder)
    old_umask = os.umask(0o077)
    try:
        write(FiguresFile(folder), replace(figures, image="old"))
        write(FiguresFile(folder), replace(figures, is_mounted=False))
    finally:
        os.umask(old_umask)
    (folder / "other.prom").write_text("another program's\n")
    (old,) = (path for path in folder.glob("*-0.prom") if 'image="old"' in path.read_text())
    an_hour_ago_s = time.time() - 3700
    for path in (old, folder / "other.prom"):
        os.utime(path, (an_hour_ago_s, an_hour_ago_s))
    write(FiguresFile(folder), replace(figures, image="new"))
    assert not old.exists()
    files = {path.name: path for path in folder.glob("*.prom")}
    assert len(files) == 3
    del files["other.prom"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o644}
    assert sorted(
        samples_of(path.read_text())["bootseer_image_mounted", ""] for path in files.values()
    ) == [0, 1]


def series_of(folder: Path) -> set[str]:
    """Return the labels in all of the files."""
    return {
        line.partition("{")[2].partition("}")[0]
        for path in folder.glob("*.prom")
        for line in path.read_text().splitlines()
        if line.startswith("bootseer_image_mounted{")
    }


def test_the_next_start_goes_on_with_the_series_of_the_last(
    tmp_path: Path, recorder: FaultRecorder
) -> None:
    """A new label at each start would be a new series at each start."""
    figures = figures_of(recorder)
    first, second = FiguresFile(tmp_path), FiguresFile(tmp_path)
    write(first, figures)
    write(second, figures)  # At the same time: the collector wants them to differ.
    both = {f'image="{figures.image}",workload="train",slot="{slot}"' for slot in "01"}
    assert series_of(tmp_path) == both
    first.close()
    write(FiguresFile(tmp_path), replace(figures, started_ns=1))
    assert series_of(tmp_path) == both
    assert any(" 1e-09" in path.read_text() for path in tmp_path.glob("*-0.prom"))


def test_no_link_in_the_folder_is_followed(tmp_path: Path, recorder: FaultRecorder) -> None:
    metrics, victim = tmp_path / "metrics", tmp_path / "victim"
    first = FiguresFile(metrics)
    write(first, figures_of(recorder))
    first.close()
    names = [path.stem for path in metrics.glob("*.prom")]
    victim.write_text("mine")
    for name in (f"{names[0]}.prom", f"{names[0]}.tmp"):
        (metrics / name).unlink(missing_ok=True)
        (metrics / name).symlink_to(victim)
    write(FiguresFile(metrics), figures_of(recorder))
    assert victim.read_text() == "mine"
    assert not (metrics / f"{names[0]}.prom").is_symlink()


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, recorder: FaultRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics").write_text("in the way")
    file = FiguresFile(tmp_path / "metrics")
    write(file, figures_of(recorder))
    write(file, figures_of(recorder))
    assert len(caplog.messages) == 1
    assert "cannot write figures" in caplog.messages[0]
