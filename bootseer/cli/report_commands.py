"""`bootseer report`: where the time of a start went."""

import json
from pathlib import Path
from typing import Any

import click

from bootseer.base.documents import to_builtins
from bootseer.cli.output import (
    current_config,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    printable,
)
from bootseer.errors import NotFoundError, from_oserror
from bootseer.profile.breakdown import Breakdown, StageRow, break_down, of_the_start
from bootseer.profile.files import read_events, read_start
from bootseer.profile.model.analysis import Analysis, StartModel
from bootseer.profile.model.tracks import tracks_of
from bootseer.profile.views.chrome_trace import to_chrome_trace
from bootseer.profile.views.document import analysis_document
from bootseer.profile.views.page import imports_of, to_page
from bootseer.profile.views.text import explain, headline
from bootseer.timeline.otlp import IMPORTS_EVENT

_COLUMNS = (
    *("stage", "nodes", "ranks", "begins s", "median s", "p99 s", "max s", "slowest", "moved"),
    "notes",
)
_NAMED_MAX = 5


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _cells(row: StageRow) -> tuple[object, ...]:
    notes = list(row.notes)
    if row.open_on:
        names = ", ".join(row.open_on[:_NAMED_MAX])
        more = len(row.open_on) - _NAMED_MAX
        notes.insert(0, f"open on {names}" + (f" and {more} more" if more > 0 else ""))
    return (
        row.name,
        row.node_count,
        row.rank_count,
        _seconds(row.begins_s),
        _seconds(row.median_s),
        _seconds(row.p99_s),
        _seconds(row.max_s),
        row.slowest_node if row.rank_count > 1 else "",
        human_bytes(row.bytes_moved) if row.bytes_moved else "",
        "; ".join(notes),
    )


def _as_json(breakdown: Breakdown, analysis: Analysis) -> dict[str, Any]:
    result = {**to_builtins(breakdown), "analysis": analysis_document(analysis)}
    rows = [(row, result["stages"][number]) for number, row in enumerate(breakdown.stages)]
    rows += [(row, result[key]) for key in ("total", "ready") if (row := getattr(breakdown, key))]
    for row, encoded in rows:
        encoded["max_over_median"] = row.max_over_median
    return result


def _title(breakdown: Breakdown, analysis: Analysis) -> str:
    parts = [f"job {breakdown.job}: {headline(analysis)}"]
    parts += [f"submission {breakdown.submission}"] if breakdown.submission else []
    parts += [f"attempt {breakdown.attempt}", f"{breakdown.node_count} node(s)"]
    if breakdown.rank_count > breakdown.node_count:
        parts.append(f"{breakdown.rank_count} ranks")
    if breakdown.restart_count:
        parts.append(f"workers restarted {breakdown.restart_count} time(s) since: not shown")
    return ", ".join(parts)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise from_oserror(error, f"write {path}") from error


@click.command(epilog="Example: bootseer report llama-70b --json")
@click.argument("job", required=False)
@click.option("--attempt", "wanted", type=click.IntRange(min=0), help="Which start; default: last.")
@click.option("--submission", metavar="ID", help="Which submission; default: last.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a Chrome trace, to open in Perfetto.",
)
@click.option(
    "--html",
    "page_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a page that a browser shows without network.",
)
@json_option
def report(
    job: str | None,
    wanted: int | None,
    submission: str | None,
    trace_file: Path | None,
    page_file: Path | None,
    as_json: bool,
) -> None:
    """Print the stages of the last start of JOB (default: the configured job) as a table.

    A stage that is "open" has begun and never ended: it hangs, or its process was killed. Times
    count from the start of the same node.
    """
    config = current_config()
    settings = config.settings
    job = job or settings.job
    if wanted is None and config.sources["attempt"] == "flag":
        wanted = settings.attempt
    stages = read_start(settings.timeline_dir, job, wanted, submission)
    breakdown = break_down(stages)
    if breakdown is None:
        raise NotFoundError(f"the timelines of job {job!r} hold no stage")
    first_ns = min(stage.start_ns for stage in stages)
    model = StartModel(tracks_of(of_the_start(stages), first_ns))
    analysis = model.analyse()
    if trace_file is not None:
        _write(trace_file, json.dumps(to_chrome_trace(stages)))
    if page_file is not None:
        bodies = read_events(settings.timeline_dir, job, wanted, submission, IMPORTS_EVENT)
        title = _title(breakdown, analysis)
        _write(page_file, to_page(title, model, analysis, imports_of(bodies)))
    if as_json:
        emit_json(_as_json(breakdown, analysis))
        return
    rows = [_cells(row) for row in breakdown.stages]
    if breakdown.total is not None:
        rows.append(_cells(breakdown.total))
    if breakdown.ready is not None:
        rows.append(("until ready", *_cells(breakdown.ready)[1:]))
    emit_table(_COLUMNS, rows, title=_title(breakdown, analysis))
    for line in explain(analysis):
        click.echo(printable(line))
