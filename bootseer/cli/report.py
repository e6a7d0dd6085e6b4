"""`bootseer report` and `bootseer watch`: where the time of a start went, and one under way."""

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from msgspec import Struct, to_builtins

from bootseer.base.redact import public_url
from bootseer.cli.command_tree import command, current_config, current_settings
from bootseer.cli.options import FiniteRange, time_option
from bootseer.cli.show import documents, emit_json, emit_table, json_option
from bootseer.cli.text import human_bytes, printable, say
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.report.decoding import ImportRow
from bootseer.report.explain import (
    Analysis,
    Breakdown,
    StageRow,
    StartModel,
    StartProgress,
    Summary,
    break_down,
    compare_starts,
    history_of,
    progress,
)
from bootseer.report.export import analysis_document, to_rows, to_trace
from bootseer.report.graph import node_of, process_name
from bootseer.report.others.foreign_stage import ForeignStage
from bootseer.report.others.kubernetes import WithPods
from bootseer.report.others.placing import ADAPTERS, ForeignStages, ask_slurm, read_other
from bootseer.report.page import to_page
from bootseer.report.read import in_background, in_order, read_graph, read_start_of
from bootseer.report.sources import (
    MergedSources,
    Source,
    StartFiles,
    StoredTimelines,
    TimelineFolder,
    find_start,
    list_starts,
)
from bootseer.report.text import explain, headline
from bootseer.settings.config import Settings
from bootseer.store import open_own_store
from bootseer.timeline.otlp import START, Stage

_F = TypeVar("_F", bound=Callable[..., Any])
_PREVIOUS = "previous"
_COLUMNS = (
    *("stage", "nodes", "ranks", "begins s", "median s", "p99 s", "max s", "slowest", "moved"),
    "notes",
)
_NAMED_MAX = 5
_STARTS_MAX = 20
_DEADLINE_S = 15.0
"""Limit for a store that does not answer: the folder may have the timelines."""
_EARLIER_MAX = 5
_SILENT_S = 600.0
"""Silence after which a start is not under way any more."""
_OVER_S = 60.0
"""Silence after which a start that had no open stage at the first look is not under way."""


# ---- starts -----------------------------------------------------------------------------------


class _ConfiguredStore(Struct, frozen=True, dict=True):
    """Timelines in the store of the settings.

    The store is opened at the first question: where it cannot be, the folder may have the answer.
    """

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
    """Return the timelines of the folder and the store of the running command."""
    settings = current_settings()
    folder = TimelineFolder(settings.timeline_dir)
    # A store beside an image in a registry holds no timelines.
    is_registry = settings.store_url.startswith("oci:")
    return folder if is_registry else MergedSources(folder, _ConfiguredStore(settings))


class ExplainedStart(Struct, dict=True):
    """Start that was read, and is explained on demand."""

    files: StartFiles
    breakdown: Breakdown
    model: StartModel
    imports: Sequence[ImportRow]
    """Slow imports of one process."""

    @cached_property
    def analysis(self) -> Analysis:
        """Explanation of the start by its model."""
        return self.model.analyse(in_order)


class ListedStart(NamedTuple):
    """Start in a list of several."""

    files: StartFiles
    summary: Summary


def listed(files: StartFiles) -> ListedStart | None:
    """Return the start of these files for a list; None if they hold no stage."""
    files = files.bounded()
    graph = read_graph(files)
    return ListedStart(files, StartModel(graph).summary) if graph.heading is not None else None


def explained(
    files: StartFiles, others: ForeignStages | None = None, *, has_imports: bool = False
) -> ExplainedStart | None:
    """Return the start of these files, with facts of other programs; None without a stage.

    `has_imports` says whether `ExplainedStart.imports` are wanted.
    """
    files = files.bounded()
    graph, imports = read_start_of(files, others=others, has_imports=has_imports)
    # The model changes the graph's times, which the process in the background has a copy of.
    with in_background(functools.partial(break_down, graph)) as broken_down:
        model = StartModel(graph)
        breakdown = broken_down()
    if breakdown is None:
        return None
    model.gather(in_background)
    return ExplainedStart(files, breakdown, model, imports)


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


def start_document(start: ExplainedStart) -> dict[str, Any]:
    """Return the whole explanation of a start, as JSON for programs."""
    breakdown = start.breakdown
    result = {**to_builtins(breakdown), "analysis": analysis_document(start.analysis)}
    rows = [(row, result["stages"][number]) for number, row in enumerate(breakdown.stages)]
    rows += [(row, result[key]) for key in ("total", "ready") if (row := getattr(breakdown, key))]
    for row, encoded in rows:
        encoded["max_over_median"] = row.max_over_median
    return result


def title_of(start: ExplainedStart) -> str:
    """Return a line with the names of the start and the time until it was ready."""
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


def show_start(start: ExplainedStart) -> None:
    """Print the table and the explanation of one start."""
    rows = [_cells(row) for row in start.breakdown.stages]
    if start.breakdown.total is not None:
        rows.append(_cells(start.breakdown.total))
    if start.breakdown.ready is not None:
        rows.append(("until ready", *_cells(start.breakdown.ready)[1:]))
    emit_table(_COLUMNS, rows, title=title_of(start))
    for line in explain(start.analysis):
        click.echo(printable(line))


def comparison_document(before: ListedStart, after: ExplainedStart) -> dict[str, Any]:
    """Return the differences of two starts, as JSON for programs."""
    return {
        "start": before.files.name,
        "ready_s": before.summary.ready_s,
        "changes": to_builtins(compare_starts(before.summary, after.analysis)),
    }


def show_comparison(before: ListedStart, after: ExplainedStart) -> None:
    """Print the table of stages on the critical paths of two starts."""
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
    """Print the newest starts, each in a line; with `history`, also trends and repeated faults."""
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


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off: a start is millions of objects, none of them in a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ---- report -----------------------------------------------------------------------------------


def _write(path: Path, data: Iterable[bytes]) -> None:
    """Write a file in one step, by a hidden file beside it that is then renamed."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            # A terminal or a pipe cannot be replaced by a file.
            _write_all(path, data)
            return
        try:
            _write_all(beside, data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise from_oserror(error, f"write {path}") from error


def _write_all(path: Path, data: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(data)


def _file_option(name: str, parameter: str, text: str) -> Callable[[_F], _F]:
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, parameter, type=kind, help=text)


@command("report", epilog="Example: bootseer report llama-70b --html start.html")
@click.argument("job", required=False)
@click.option(
    "--attempt",
    "wanted",
    type=click.IntRange(min=0),
    help="Attempt of the submission; default: the last one.",
)
@click.option("--submission", metavar="ID", help="Submission; default: the last one.")
@click.option(
    "--compare",
    metavar="START",
    help="Compare with SUBMISSION:ATTEMPT, or with the `previous` start.",
)
@click.option("--list", "lists", is_flag=True, help="List the last starts.")
@click.option("--history", is_flag=True, help="Summarize the last starts.")
@click.option(
    "--with",
    "others",
    multiple=True,
    metavar="KIND=FILE",
    help=f"Also take in what another program wrote ({', '.join(ADAPTERS)}); - is standard input.",
)
@_file_option("--trace", "trace_file", "Also write a trace to open in Perfetto.")
@_file_option("--rows", "rows_file", "Also write all stages, each as a line of JSON.")
@_file_option("--html", "page_file", "Also write a page that a browser shows without network.")
@json_option
@_without_collector()
def report(
    job: str | None,
    wanted: int | None,
    submission: str | None,
    compare: str | None,
    lists: bool,
    history: bool,
    others: tuple[str, ...],
    trace_file: Path | None,
    rows_file: Path | None,
    page_file: Path | None,
    as_json: bool,
) -> None:
    """Explain the last start of JOB (default: the configured job).

    Shows a table of its stages, the critical path until the last process was ready, the process
    that delayed the others at each barrier, nodes slower than their peers and the causes, and the
    estimated duration without these delays. A stage that is "open" has begun and never ended: it
    hangs, or its process was killed. Times in the table count from the start of the same node.

    Reads the timelines in `timeline_dir` and those that nodes have put into the store.
    """
    config = current_config()
    settings = config.settings
    job = job or settings.job
    source: Source = current_timelines()
    known = [_other_of(one) for one in others]
    for one in known:
        if one.kind == "kubernetes":
            source = WithPods(source, one.data)
    if lists or history:
        show_starts(source, job, history, as_json)
        return
    if wanted is None and config.sources["attempt"] == "flag":
        wanted = settings.attempt
    files = find_start(source, job, wanted, submission)
    start = explained(files, _others(files, known), has_imports=page_file is not None)
    if start is None:
        raise NotFoundError(f"the timelines of job {job!r} hold no stage")
    other = _other(source, job, start, compare) if compare else None
    compared = {"comparison": comparison_document(other, start)} if other else {}
    if trace_file is not None:
        _write(trace_file, [to_trace(start.model.graph)])
    if rows_file is not None:
        _write(rows_file, to_rows(files))
    if page_file is not None:
        page = to_page(title_of(start), start.model, start.analysis, start.imports, **compared)
        _write(page_file, [page.encode("utf-8")])
    if as_json:
        emit_json({**start_document(start), **compared})
        return
    show_start(start)
    if other is not None:
        show_comparison(other, start)


class _Other(Struct, dict=True):
    """File of another program, as `--with` names it."""

    kind: str
    file: str

    @cached_property
    def data(self) -> bytes:
        """Raises: InvalidInputError, NotFoundError."""
        return read_other(Path("/dev/stdin" if self.file == "-" else self.file))


def _other_of(option: str) -> _Other:
    """Raises: BadParameter."""
    kind, _, name = option.partition("=")
    if kind not in ADAPTERS or not name:
        raise click.BadParameter(
            f"{option!r} is not KIND=FILE with KIND one of {', '.join(ADAPTERS)}",
            param_hint="--with",
        )
    return _Other(kind, name)


def _others(files: StartFiles, read: Sequence[_Other]) -> ForeignStages:
    """Return the facts of other programs; Slurm is asked unless `--with` gives its answer."""
    known: dict[str, list[ForeignStage]] = {}
    for one in read:
        known.setdefault(one.kind, []).extend(ADAPTERS[one.kind](one.data))
    if "slurm" not in known:
        known["slurm"] = [*ask_slurm(files.submission)]
    return ForeignStages(known)


def _other(source: Source, job: str, start: ExplainedStart, name: str) -> ListedStart:
    """Return the start to compare with. Raises: InvalidInputError; NotFoundError."""
    if name == _PREVIOUS:
        starts = list_starts(source, job)
        places = [number for number, one in enumerate(starts) if one.name == start.files.name]
        found = starts[places[0] + 1 :][:1] if places else []
        if not found:
            raise NotFoundError(f"job {job!r} has no start before {start.files.name}")
        files = found[0]
    else:
        submission, _, attempt = name.rpartition(":")
        if not attempt.isdecimal():
            raise InvalidInputError(
                f"{name!r} is no start: write SUBMISSION:ATTEMPT as `bootseer report --list` has it"
            )
        files = find_start(source, job, int(attempt), submission)
    other = listed(files)
    if other is None:
        raise NotFoundError(f"the timelines of start {files.name} hold no stage")
    return other


# ---- watch ------------------------------------------------------------------------------------


@command("watch", epilog="Example: bootseer watch llama-70b --times 3")
@click.argument("job", required=False)
@click.option(
    "--times",
    type=FiniteRange(min=0),
    default=3.0,
    show_default=True,
    help="Report a stage that is open for this multiple of its median.",
)
@time_option("--every", default_s=2.0, least_s=0.1, help="Interval between two looks.")
@click.option("--once", is_flag=True, help="Look once, then exit.")
@json_option
@documents(StartProgress)
def watch(job: str | None, times: float, every: float, once: bool, as_json: bool) -> None:
    """Follow the newest start of JOB (default: the configured job) until it is ready.

    Reads the timelines in `timeline_dir`, which are current if the nodes share that folder, and
    those in the store, which nodes update from time to time until they are ready. Ends with the
    reason when all processes are ready, when the start has failed, when no stage was recorded for
    ten minutes, or if no start is under way.
    """
    settings = current_settings()
    job = job or settings.job
    source = current_timelines()
    earlier = _earlier(source, job)
    silent_max_s = _OVER_S
    while True:
        looked_s = time.monotonic()
        files = find_start(source, job)
        stages = list(files.stages())
        found = progress(stages, time.time_ns(), times, earlier)
        if as_json:
            emit_json(to_builtins(found))
        else:
            for line in _lines(job, found):
                click.echo(printable(line))
        silent_s = time.time() - files.modified_ns / 1e9
        is_open = any(stage.open_count for stage in found.stages)
        why = _end(found, stages, silent_s, _SILENT_S if is_open else silent_max_s)
        if why and not once:
            say(f"{why}; `bootseer report {job}` explains the start")
        if once or why:
            return
        if not is_open and silent_max_s != _SILENT_S:
            say("no stage is open: waiting until the job calls bootseer.ready(); Ctrl-C ends this")
        # A start that is followed may load for long without a line on its timeline.
        silent_max_s = _SILENT_S
        # Reading a large start from a store takes long, so the pause is as long as the last look.
        time.sleep(max(0.1, every, time.monotonic() - looked_s))


def _earlier(source: Source, job: str) -> Sequence[float]:
    """Return the seconds until ready of earlier starts, as far as they were ready."""
    starts = list_starts(source, job)
    if not starts:
        raise NotFoundError(f"no timeline of job {job!r} in {source.where}")
    models = [StartModel(read_graph(one.bounded())) for one in starts[1 : _EARLIER_MAX + 1]]
    return [model.measured_s for model in models if model.is_ready]


def _end(
    found: StartProgress, stages: Sequence[Stage], silent_s: float, silent_max_s: float
) -> str:
    """Return why there is nothing more to follow; empty while there is."""
    is_open = any(stage.open_count for stage in found.stages)
    failed = next((stage for stage in stages if stage.name == START and stage.failed), None)
    if found.ready_count and not is_open:
        return f"the start is over: {found.ready_count} process(es) are ready"
    if failed is not None and not is_open:
        why = f": {failed.message}" if failed.message else ""
        return f"the start has failed on {node_of(failed)}{why}"
    if silent_s > silent_max_s:
        return f"nothing is under way: no node has noted anything for {silent_s:.0f} s"
    return ""


def _lines(job: str, found: StartProgress) -> list[str]:
    expected = f", expected {found.expected_s:.0f} s" if found.expected_s is not None else ""
    lines = [
        f"job {job}: {found.elapsed_s:.0f} s{expected}; {found.node_count} node(s), "
        f"{found.ready_count} process(es) ready"
    ]
    for stage in found.stages:
        if stage.open_count:
            lines.append(f"  {stage.name}: open on {stage.open_count}, done on {stage.done_count}")
    for one in found.hanging:
        where = process_name(one.node, one.rank)
        times = f"open for {one.open_s:.0f} s, median {one.median_s:.1f} s"
        lines.append(f"  {where} hangs in {one.stage}: {times}")
    return lines
