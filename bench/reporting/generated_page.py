"""Generated parts of README.md, docs/benchmarks.md and docs/results.md, from bench/results."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.model import Case
from bench.reporting.peers_table import peer_rows, readme_rows
from bench.reporting.result import Result, load
from bench.reporting.tables import Row, environment_line, ratio_rows, variant_rows

RESULTS, PEERS = "results", "peers"


def load_results(folder: Path) -> list[Result]:
    """Return the committed results, sorted by case name."""
    return [
        load(path)
        for path in sorted(folder.glob("*.json"))
        if not path.name.endswith(".local.json")
    ]


def render(results: Iterable[Result], cases: Mapping[str, Case]) -> str:
    """Return Markdown for all results. Pure."""
    parts = [_render_one(result, cases[result.case]) for result in results if result.case in cases]
    return "\n".join(parts) if parts else "No results yet.\n"


def readme(document: str, results: Sequence[Result]) -> str:
    """Return the README `document` with its table of ratios written again."""
    return replace(document, PEERS, "\n".join(_table(*readme_rows(results))) + "\n")


def benchmarks(document: str, results: Sequence[Result]) -> str:
    """Return docs/benchmarks.md (`document`) with its table of ratios written again."""
    return replace(document, PEERS, "\n".join(_table(*peer_rows(results))) + "\n")


def all_results(document: str, results: Sequence[Result], cases: Mapping[str, Case]) -> str:
    """Return docs/results.md (`document`) with the section of each case written again."""
    return replace(document, RESULTS, render(results, cases))


def markers(part: str) -> tuple[str, str]:
    """Return the lines before and after a generated part of a page."""
    return (
        f"<!-- {part}: written by `python -m bench --report`, not by hand -->",
        f"<!-- end of {part} -->",
    )


def replace(document: str, part: str, generated: str) -> str:
    """Return `document` with the text between a part's markers replaced.

    Raises: ValueError where the document lacks the markers.
    """
    begin, end = markers(part)
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the document lacks the lines {begin} and {end}")
    return f"{before}{begin}\n\n{generated}\n{end}{after}"


def _render_one(result: Result, case: Case) -> str:
    day = datetime.fromtimestamp(result.started_at_s, UTC).strftime("%Y-%m-%d")
    rounds = len({run.round_number for run in result.runs})
    kind = "quick run" if result.is_quick else "full run"
    lines = [
        f"### {result.case}",
        "",
        result.description,
        "",
        *_table(*variant_rows(result, case.columns)),
        "",
        *_table(*ratio_rows(result.ratios)),
        "",
        f"{day}, {kind}, {rounds} rounds. {environment_line(result)}.",
        *(f"{note}." for note in result.notes),
        "",
    ]
    return "\n".join(lines)


def _table(header: Row, rows: Sequence[Row]) -> list[str]:
    def line(cells: Row) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]
