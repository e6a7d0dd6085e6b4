"""Rows of text for the tables of a result, on a terminal or in Markdown. Pure."""

from collections.abc import Sequence

from bench.model import Column
from bench.reporting.result import Result
from bench.reporting.summary import RatioResult, spreads

Row = tuple[str, ...]


def variant_rows(result: Result, columns: Sequence[Column]) -> tuple[Row, list[Row]]:
    """Return the header, and for each variant the median and range of each column's figure."""
    header = ("variant", *(column.title for column in columns))
    measured = spreads(result.runs)
    rows: list[Row] = []
    for variant in result.variants:
        figures = measured.get(variant.name)
        if figures is None:
            reason = f"skipped: {variant.skipped}" if variant.skipped else "no run"
            rows.append((variant.name, reason, *("" for _ in columns[1:])))
            continue
        cells = []
        for column in columns:
            spread = figures.get(column.figure)
            if spread is None:
                cells.append("-")
            else:
                low, middle, high = (
                    f"{value * column.scale:.{column.digits}f}"
                    for value in (spread.minimum, spread.median, spread.maximum)
                )
                cells.append(middle if low == high else f"{middle} ({low} to {high})")
        rows.append((variant.name, *cells))
    return header, rows


def ratio_rows(ratios: Sequence[RatioResult]) -> tuple[Row, list[Row]]:
    """Return the header, and for each ratio the median and range of its values per round."""
    rows: list[Row] = []
    for measured in ratios:
        target = str(measured.ratio.target) if measured.ratio.target else ""
        verdict = {True: "met", False: "MISSED", None: ""}[measured.is_met]
        spread = measured.spread
        if spread is None:
            rows.append((measured.ratio.name, "not measured", "", target, ""))
        else:
            extent = f"{spread.minimum:.2f} to {spread.maximum:.2f}"
            rows.append((measured.ratio.name, f"{spread.median:.2f}", extent, target, verdict))
    return ("ratio", "median", "per round", "target", ""), rows


def environment_line(result: Result) -> str:
    """Return a sentence on where and when the case ran."""
    where = result.environment
    memory_gib = where["memory_bytes"] / 2**30
    return (
        f"Linux {where['kernel']}, {where['cpu_count']} x {where['cpu_model']}, "
        f"{memory_gib:.0f} GiB, Python {where['python']}, commit {where['commit']}, "
        f"load {where['load_average']} at the start"
    )
