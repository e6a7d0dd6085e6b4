"""The generated part of docs/benchmarks.md, from the committed results."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.model import Case
from bench.reporting.result import Result, load
from bench.reporting.tables import Row, environment_line, ratio_rows, variant_rows

BEGIN = "<!-- results: written by `python -m bench --report`, not by hand -->"
END = "<!-- end of results -->"


def load_results(folder: Path) -> list[Result]:
    """The committed results, by case name."""
    return [
        load(path)
        for path in sorted(folder.glob("*.json"))
        if not path.name.endswith(".local.json")
    ]


def render(results: Iterable[Result], cases: Mapping[str, Case]) -> str:
    """Markdown for all results. Pure (no I/O)."""
    parts = [_render_one(result, cases[result.case]) for result in results if result.case in cases]
    return "\n".join(parts) if parts else "No results yet.\n"


def replace_results(document: str, generated: str) -> str:
    """`document` with what stands between the markers replaced. Raises: ValueError without them."""
    before, found, rest = document.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"the document lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


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
