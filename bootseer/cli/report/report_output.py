"""How starts are shown by `bootseer report` and `bootseer watch`: tables and JSON."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import click
from msgspec import Struct, to_builtins

from bootseer.base.redact import public_url
from bootseer.cli.output import current_settings, emit_json, emit_table, human_bytes, printable
from bootseer.errors import NotFoundError
from bootseer.report.explain import (
    Analysis,
    Breakdown,
    StageRow,
    StartModel,
    Summary,
    break_down,
    compare_starts,
    history_of,
)
from bootseer.report.export import analysis_document
from bootseer.report.others.placing import ForeignStages
from bootseer.report.read import in_order, read_graph
from bootseer.report.sources import (
    MergedSources,
    Source,
    StartFiles,
    StoredTimelines,
    TimelineFolder,
    list_starts,
)
from bootseer.report.text import explain, headline
from bootseer.settings.config import Settings
from bootseer.store import open_own_store

_COLUMNS = (
    *("stage", "nodes", "ranks", "begins s", "median s", "p99 s", "max s", "slowest", "moved"),
    "notes",
)
_NAMED_MAX = 5
_STARTS_MAX = 20
_DEADLINE_S = 15.0
"""For a store that does not answer: the folder may have what is asked for."""


class _ConfiguredStore(Struct, frozen=True, dict=True):
    """The store of the settings. It is opened when it is asked, since the folder may have what is
    asked for where it cannot be."""

    settings: Settings

    @property
    def where(self) -> str:
        return public_url(self.settings.store_url)

    @cached_property
    def _stored(self) -> StoredTimelines:
        deadline_s = min(self.settings.deadline_s, _DEADLINE_S)
        return StoredTimelines(open_own_store(self.settings, deadline_s=deadline_s))

    def starts(self, job: str) -> Iterable[StartFiles]:
        return self._stored.starts(job)


def current_timelines() -> Source:
    """Where the command that is running finds timelines."""
    settings = current_settings()
    folder = TimelineFolder(settings.timeline_dir)
    # Beside an image in a registry there are none.
    is_registry = settings.store_url.startswith("oci:")
    return folder if is_registry else MergedSources(folder, _ConfiguredStore(settings))


class Explained(Struct, dict=True):
    """One start, read, and explained when it is asked."""

    files: StartFiles
    breakdown: Breakdown
    model: StartModel

    @cached_property
    def analysis(self) -> Analysis:
        """All that the model says of it."""
        return self.model.analyse(in_order)


class Listed(NamedTuple):
    """One start beside others."""

    files: StartFiles
    summary: Summary


def listed(files: StartFiles) -> Listed | None:
    """The start of these files; None where they hold no stage."""
    files = files.bounded()
    graph = read_graph(files)
    return Listed(files, StartModel(graph).summary) if graph.heading is not None else None


def explained(files: StartFiles, others: ForeignStages | None = None) -> Explained | None:
    """The start of these files, with what other programs know of it; None where they hold no
    stage."""
    files = files.bounded()
    graph = read_graph(files, others=others)
    breakdown = break_down(graph)
    return None if breakdown is None else Explained(files, breakdown, StartModel(graph))


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


def start_document(start: Explained) -> dict[str, Any]:
    """All that is known of a start, as JSON for programs."""
    breakdown = start.breakdown
    result = {**to_builtins(breakdown), "analysis": analysis_document(start.analysis)}
    rows = [(row, result["stages"][number]) for number, row in enumerate(breakdown.stages)]
    rows += [(row, result[key]) for key in ("total", "ready") if (row := getattr(breakdown, key))]
    for row, encoded in rows:
        encoded["max_over_median"] = row.max_over_median
    return result


def title_of(start: Explained) -> str:
    """One line that says which start it is, and when it was ready."""
    breakdown = start.breakdown
    parts = [f"job {breakdown.job}: {headline(start.analysis)}"]
    parts += [f"submission {breakdown.submission}"] if breakdown.submission else []
    parts += [f"attempt {breakdown.attempt}", f"{breakdown.node_count} node(s)"]
    if breakdown.rank_count > breakdown.node_count:
        parts.append(f"{breakdown.rank_count} ranks")
    if failure := breakdown.failure:
        where = f"{failure.node}/{failure.rank} failed in {failure.stage}"
        parts.append(f"workers restarted {breakdown.restart_count} time(s), since {where}")
    elif breakdown.restart_count:
        parts.append(f"workers restarted {breakdown.restart_count} time(s) later: not shown")
    return ", ".join(parts)


def show_start(start: Explained) -> None:
    """The table and the explanation of one start."""
    rows = [_cells(row) for row in start.breakdown.stages]
    if start.breakdown.total is not None:
        rows.append(_cells(start.breakdown.total))
    if start.breakdown.ready is not None:
        rows.append(("until ready", *_cells(start.breakdown.ready)[1:]))
    emit_table(_COLUMNS, rows, title=title_of(start))
    for line in explain(start.analysis):
        click.echo(printable(line))


def comparison_document(before: Listed, after: Explained) -> dict[str, Any]:
    """How two starts differ, as JSON for programs."""
    return {
        "start": before.files.name,
        "ready_s": before.summary.ready_s,
        "changes": to_builtins(compare_starts(before.summary, after.analysis)),
    }


def show_comparison(before: Listed, after: Explained) -> None:
    """The table of what another start spent its critical path on."""
    changes = compare_starts(before.summary, after.analysis)
    more = after.analysis.ready_s - before.summary.ready_s
    title = f"critical path against start {before.files.name}: {more:+.2f} s until ready"
    rows = [
        (one.stage, _seconds(one.before_s), _seconds(one.after_s), f"{one.more_s:+.2f}")
        for one in changes[:_STARTS_MAX]
    ]
    click.echo("")
    emit_table(("stage", "before s", "now s", "more s"), rows, title=title)


def show_starts(source: Source, job: str, history: bool, as_json: bool) -> None:
    """The newest starts, each in a line; with `history`, what they say together."""
    files = list_starts(source, job)[:_STARTS_MAX]
    found = [start for one in files if (start := listed(one)) is not None]
    if not found:
        raise NotFoundError(f"no timeline of job {job!r} in {source.where}")
    looked = history_of([start.summary for start in reversed(found)])
    if as_json:
        starts = [
            {
                "start": start.files.name,
                "began": start.files.began,
                "node_count": start.summary.node_count,
                "is_ready": start.summary.is_ready,
                "ready_s": start.summary.ready_s,
                "stragglers": [one.node for one in start.summary.stragglers],
            }
            for start in found
        ]
        emit_json({"starts": starts, **({"history": to_builtins(looked)} if history else {})})
        return
    rows = []
    for start in found:
        longest = max(start.summary.path, key=lambda one: one.seconds, default=None)
        longest_text = f"{longest.label} {longest.seconds:.1f} s" if longest else ""
        count = len(start.summary.stragglers)
        rows.append(
            (
                start.files.name,
                start.files.began,
                start.summary.node_count,
                _seconds(start.summary.ready_s) if start.summary.is_ready else "not ready",
                longest_text,
                f"{count} slow node(s)" if count else "",
            )
        )
    columns = ("start", "began", "nodes", "ready s", "longest on the critical path", "notes")
    emit_table(columns, rows, title=f"starts of job {job}, the newest first")
    if not history:
        return
    click.echo(f"\ntrend: {looked.trend_s:+.2f} s from one start to the next")
    for change in looked.slower:
        click.echo(
            f"slower now: {printable(change.stage)} takes {change.after_s:.1f} s, "
            f"median before {change.before_s:.1f} s"
        )
    for one in looked.repeated:
        click.echo(
            f"slow again and again: {printable(one.node)} in {one.start_count} of "
            f"{len(found)} starts"
        )
