"""`python -m bench`: lists cases, runs one, or writes the report."""

import compileall
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from bench.catalogue import all_cases
from bench.fanout.plot import scale_plot
from bench.model import Case, only
from bench.reporting import generated_page
from bench.reporting.result import Result, save
from bench.reporting.tables import Row, environment_line, ratio_rows, variant_rows
from bench.runner import run_case, smoke
from testbed.needs import MissingError
from testbed.search_path import usual_search_path

_HERE = Path(__file__).resolve().parent
_RESULTS = _HERE / "results"
_README = _HERE.parent / "README.md"
_DOCUMENT = _HERE.parent / "docs" / "benchmarks.md"
_ALL_RESULTS = _HERE.parent / "docs" / "results.md"
_PLOT = _HERE.parent / "docs" / "scale.svg"
_PACKAGES = ("bootseer", "fuse", "prefetch", "snapshots")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("case_name", metavar="[CASE]", required=False)
@click.option("--list", "is_list", is_flag=True, help="List the cases, and for whom each is.")
@click.option("--quick", "is_quick", is_flag=True, help="Smaller and fewer runs, for a first look.")
@click.option(
    "--smoke",
    "is_smoke",
    is_flag=True,
    help="Try each variant of CASE (of all cases if none is named) once, with the least sizes.",
)
@click.option(
    "--only", "names", metavar="VARIANT", multiple=True, help="Run this variant, and no others."
)
@click.option("--runs", type=click.IntRange(1, 1000), help="Recorded rounds.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every run and the ratios to this file.",
)
@click.option(
    "--work-dir",
    "work_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bootseer-bench",
    help="Where packages and images are kept between runs (default: ~/.cache/bootseer-bench).",
)
@click.option("--strict", "is_strict", is_flag=True, help="Exit with 1 when a target is missed.")
@click.option(
    "--report",
    "is_report",
    is_flag=True,
    help="Write the tables of README.md, benchmarks.md and results.md from bench/results.",
)
def main(
    case_name: str | None,
    *,
    is_list: bool,
    is_quick: bool,
    is_smoke: bool,
    names: tuple[str, ...],
    runs: int | None,
    json_file: Path | None,
    work_dir: Path,
    is_strict: bool,
    is_report: bool,
) -> None:
    """Measure CASE: its variants side by side, as ratios.

    \b
    Example:
      python -m bench fuse-read --quick --json /tmp/fuse-read.json
    """
    os.environ["PATH"] = usual_search_path()
    cases = all_cases()
    if is_list:
        for case in cases.values():
            click.echo(f"{case.name:<20} {case.audience:<7} {case.description}")
    elif is_report:
        results = generated_page.load_results(_RESULTS)
        _README.write_text(generated_page.readme(_README.read_text(), results))
        _DOCUMENT.write_text(generated_page.benchmarks(_DOCUMENT.read_text(), results))
        _ALL_RESULTS.write_text(
            generated_page.all_results(_ALL_RESULTS.read_text(), results, cases)
        )
        for result in results:
            if result.case == "fanout":
                _PLOT.write_text(scale_plot(result))
        click.echo(
            "wrote the tables of README.md, benchmarks.md, results.md, and the plot", err=True
        )
    elif case_name is None and not is_smoke:
        raise click.UsageError("name a case, or use --list, --smoke or --report")
    elif case_name is not None and case_name not in cases:
        raise click.UsageError(f"there is no case {case_name!r}; --list shows them")
    elif is_smoke:
        signal.signal(signal.SIGTERM, _end)
        chosen = cases.values() if case_name is None else [cases[case_name]]
        # Run all cases, also after one that failed.
        worked = [_smoke(case, names, work_dir.absolute()) for case in chosen]
        if not all(worked):
            sys.exit(1)
    elif case_name is not None:
        case = cases[case_name]
        # Exit by an exception on SIGTERM, so that mounts and servers are taken down.
        signal.signal(signal.SIGTERM, _end)
        log = Console(stderr=True, highlight=False, markup=False)
        # An installed package has its bytecode. A checkout lacks that of edited files where
        # PYTHONDONTWRITEBYTECODE is set, and every start would compile them.
        for package in _PACKAGES:
            compileall.compile_dir(_HERE.parent / package, quiet=2)
        try:
            if names:
                case = only(case, names)
            result = run_case(
                case, is_quick=is_quick, kept=work_dir.absolute(), rounds=runs, say=log.print
            )
        except MissingError as reason:
            raise click.ClickException(f"{case_name} cannot run here: {reason}") from reason
        if json_file is not None:
            save(result, json_file)
        _show(result, *variant_rows(result, case.columns), *ratio_rows(result.ratios))
        if is_strict and any(ratio.is_met is False for ratio in result.ratios):
            sys.exit(1)


def _smoke(case: Case, names: tuple[str, ...], kept: Path) -> bool:
    """Print the outcome of each variant, or of those named; return False if one failed."""
    log = Console(stderr=True, highlight=False, markup=False)
    try:
        result = smoke(only(case, names) if names else case, kept=kept, say=log.print)
    except MissingError as error:
        click.echo(f"{case.name}: cannot run here: {error}")
        return True
    except Exception:
        # A case that does not fit the code any more may raise anything; the other cases still run.
        click.echo(f"{case.name}: FAILED: {traceback.format_exc()}")
        return False
    click.echo(f"{case.name}: ran: {', '.join(result.ran) or 'nothing'}")
    for what, reasons in (("skipped", result.skipped), ("FAILED", result.failed)):
        for name, reason in reasons.items():
            click.echo(f"{case.name}: {what}: {name}: {reason}")
    return not result.failed


def _end(number: int, frame: FrameType | None) -> None:
    # timeout(1) sends its signal twice; the second must not interrupt the exit.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _show(
    result: Result, header: Row, rows: list[Row], ratio_header: Row, ratios: list[Row]
) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    console.print(f"{result.case}: {result.description}")
    console.print(environment_line(result))
    for note in result.notes:
        console.print(note)
    for titles, lines in ((header, rows), (ratio_header, ratios)):
        table = Table(box=None, pad_edge=False)
        for number, title in enumerate(titles):
            table.add_column(title, justify="left" if number == 0 else "right")
        for line in lines:
            table.add_row(*line)
        console.print()
        console.print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench")
