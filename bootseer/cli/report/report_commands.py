"""`bootseer report`: where the time of a start went, and how starts differ."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct

from bootseer.cli.output import current_config, emit_json, json_option
from bootseer.cli.report.report_output import (
    Explained,
    Listed,
    comparison_document,
    current_timelines,
    explained,
    listed,
    show_comparison,
    show_start,
    show_starts,
    start_document,
    title_of,
)
from bootseer.errors import InvalidInputError, NotFoundError, from_oserror
from bootseer.report.export import to_rows, to_trace
from bootseer.report.others.foreign_stage import ForeignStage
from bootseer.report.others.kubernetes import WithPods
from bootseer.report.others.placing import ADAPTERS, ForeignStages, ask_slurm, read_other
from bootseer.report.page import imports_of, to_page
from bootseer.report.read import read_events
from bootseer.report.sources import Source, StartFiles, find_start, list_starts
from bootseer.timeline.otlp import IMPORTS_EVENT

_F = TypeVar("_F", bound=Callable[..., Any])
_PREVIOUS = "previous"


def _write(path: Path, data: Iterable[bytes]) -> None:
    """Whole or not at all: what a killed command leaves is hidden, and has another name."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            # A terminal or a pipe: there is nothing to be put in its place.
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


@click.command(epilog="Example: bootseer report llama-70b --html start.html")
@click.argument("job", required=False)
@click.option("--attempt", "wanted", type=click.IntRange(min=0), help="Which start; default: last.")
@click.option("--submission", metavar="ID", help="Which submission; default: last.")
@click.option(
    "--compare",
    metavar="START",
    help="Also say how it differs from SUBMISSION:ATTEMPT, or from the `previous` start.",
)
@click.option("--list", "lists", is_flag=True, help="List the last starts instead.")
@click.option("--history", is_flag=True, help="Say what the last starts have in common instead.")
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

    A table of its stages, the critical path until the last process was ready, who held the others
    at each barrier, nodes slower than their peers and why, and what the start would have been. A
    stage that is "open" has begun and never ended: it hangs, or its process was killed. Times of
    the table count from the start of the same node.

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
    start = explained(files, _others(files, known))
    if start is None:
        raise NotFoundError(f"the timelines of job {job!r} hold no stage")
    other = _other(source, job, start, compare) if compare else None
    compared = {"comparison": comparison_document(other, start)} if other else {}
    if trace_file is not None:
        _write(trace_file, [to_trace(start.model.graph)])
    if rows_file is not None:
        _write(rows_file, to_rows(files))
    if page_file is not None:
        imports = imports_of(read_events(start.files, IMPORTS_EVENT))
        page = to_page(title_of(start), start.model, start.analysis, imports, **compared)
        _write(page_file, [page.encode("utf-8")])
    if as_json:
        emit_json({**start_document(start), **compared})
        return
    show_start(start)
    if other is not None:
        show_comparison(other, start)


class _Other(Struct, dict=True):
    """What another program knows, as `--with` names it."""

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
    """What other programs know: Slurm is asked, where nobody gives its answer."""
    known: dict[str, list[ForeignStage]] = {}
    for one in read:
        known.setdefault(one.kind, []).extend(ADAPTERS[one.kind](one.data))
    if "slurm" not in known:
        known["slurm"] = [*ask_slurm(files.submission)]
    return ForeignStages(known)


def _other(source: Source, job: str, start: Explained, name: str) -> Listed:
    """The start to compare with. Raises: InvalidInputError; NotFoundError."""
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
