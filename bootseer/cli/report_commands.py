"""`bootseer report`: where the time of a start went."""

import json
from pathlib import Path
from typing import Any

import click

from bootseer.cli.output import current_settings, emit_json, emit_table, human_bytes, json_option
from bootseer.errors import NotFoundError, from_oserror
from bootseer.report.breakdown import Breakdown, StageRow, break_down
from bootseer.report.chrome_trace import to_chrome_trace
from bootseer.report.files import read_start
from bootseer.structs import asdict


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cells(row: StageRow) -> tuple[object, ...]:
    ratio = row.max_over_median
    notes = list(row.notes)
    if row.open_count:
        notes.insert(0, f"open on {row.open_count}")
    return (
        row.name,
        row.node_count,
        _seconds(row.begins_s),
        _seconds(row.median_s),
        _seconds(row.max_s),
        "" if ratio is None else f"{ratio:.2f}",
        row.slowest_node if row.node_count > 1 else "",
        human_bytes(row.bytes_moved) if row.bytes_moved else "",
        "; ".join(notes),
    )


def _as_json(breakdown: Breakdown) -> dict[str, Any]:
    result = asdict(breakdown)
    for row, encoded in zip(breakdown.stages, result["stages"], strict=True):
        encoded["max_over_median"] = row.max_over_median
    if breakdown.total is not None:
        result["total"]["max_over_median"] = breakdown.total.max_over_median
    return result


@click.command(epilog="Example: bootseer report llama-70b --json")
@click.argument("job", required=False)
@click.option("--attempt", "wanted", type=click.IntRange(min=0), help="Which start; default: last.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a Chrome trace, to open in Perfetto.",
)
@json_option
def report(job: str | None, wanted: int | None, trace_file: Path | None, as_json: bool) -> None:
    """Print the stages of the last start of JOB (default: the configured job) as a table.

    A stage that is "open" has begun and never ended: it hangs, or its process was killed.
    """
    settings = current_settings()
    job = job or settings.job
    stages = read_start(settings.timeline_dir, job, wanted)
    breakdown = break_down(stages)
    if breakdown is None:
        raise NotFoundError(f"the timelines of job {job!r} hold no stage")
    if trace_file is not None:
        try:
            trace_file.write_text(json.dumps(to_chrome_trace(stages)), encoding="utf-8")
        except OSError as error:
            raise from_oserror(error, f"write the trace {trace_file}") from error
    if as_json:
        emit_json(_as_json(breakdown))
        return
    rows = [_cells(row) for row in breakdown.stages]
    if breakdown.total is not None:
        rows.append(_cells(breakdown.total))
    emit_table(
        ("stage", "nodes", "begins s", "median s", "max s", "ratio", "slowest", "moved", "notes"),
        rows,
        title=f"job {breakdown.job}, attempt {breakdown.attempt}, {breakdown.node_count} node(s)",
    )
