"""`bootseer watch`: which nodes of a start that is under way are where, and what hangs."""

import time
from collections.abc import Sequence

import click
from msgspec import to_builtins

from bootseer.cli.output import (
    FiniteRange,
    Seconds,
    current_settings,
    emit_json,
    json_option,
    printable,
    say,
)
from bootseer.cli.report.report_output import current_timelines, explained
from bootseer.errors import NotFoundError
from bootseer.report.explain import StartProgress, progress
from bootseer.report.graph import node_of
from bootseer.report.sources import Source, find_start, list_starts
from bootseer.timeline.otlp import START, Stage

_EARLIER_MAX = 5
_SILENT_S = 600.0
"""A start on whose timelines nothing was written for so long is not under way any more."""
_OVER_S = 60.0
"""The same for one of which no stage is open when it is first looked at."""


@click.command(epilog="Example: bootseer watch llama-70b --times 3")
@click.argument("job", required=False)
@click.option(
    "--times",
    type=FiniteRange(min=0),
    default=3.0,
    show_default=True,
    help="Name stages open for so many medians.",
)
@click.option(
    "--every",
    type=Seconds(0.1, 86_400),
    default=2.0,
    show_default=True,
    metavar="TIME",
    help="Look so often.",
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@json_option
def watch(job: str | None, times: float, every: float, once: bool, as_json: bool) -> None:
    """Follow the newest start of JOB (default: the configured job) until it is ready.

    Reads the timelines in `timeline_dir`, at once where the nodes share that folder, and those that
    nodes have put into the store, which they do now and then until they are ready.
    Ends, and says why, when all processes are ready, when the start has failed, when nothing was
    noted for ten minutes, and at once where nothing is under way.
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
        # From now on the start is followed, and may load for long.
        silent_max_s = _SILENT_S
        # A large start in a store takes a while to read: it is not read all the time.
        time.sleep(max(0.1, every, time.monotonic() - looked_s))


def _earlier(source: Source, job: str) -> Sequence[float]:
    """How long the starts before the newest one took until they were ready, as far as they were."""
    starts = list_starts(source, job)
    if not starts:
        raise NotFoundError(f"no timeline of job {job!r} in {source.where}")
    found = [explained(one) for one in starts[1 : _EARLIER_MAX + 1]]
    models = [start.model for start in found if start is not None]
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
        where = f"{one.node}/{one.rank}" if one.rank >= 0 else one.node
        times = f"open for {one.open_s:.0f} s, median {one.median_s:.1f} s"
        lines.append(f"  {where} hangs in {one.stage}: {times}")
    return lines
