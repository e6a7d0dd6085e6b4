"""Report of a start as one HTML file that needs no network. Reads its template `start.html`.

The file holds its data as JSON, and its script draws them. Names of nodes and stages are hostile:
the JSON is escaped for HTML, and the script inserts text only as text.
"""

import base64
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib.resources import files
from typing import Any

from bootseer.report.decoding import ImportRow
from bootseer.report.explain import Analysis, StartModel
from bootseer.report.export import analysis_document
from bootseer.report.graph import BEFORE_LAUNCHER, NO_RANK, Group, begin_of, end_of, process_name
from bootseer.report.peers import PeerGroup, base_of

_GANTT_PROCESSES_MAX = 40
_GANTT_SPANS_MAX = 80
_HEAT_STAGES_MAX = 30
_NAMED_NODES_MAX = 200
# A stage gets a column if it takes at least this share of the start on some node.
_SHARE_MIN = 0.005
# A cell of the heat map is a byte: 64 is the median, and 32 more is twice the time.
_MEDIAN_CELL, _CELL_STEPS_PER_OCTAVE, _NO_CELL = 64, 32, 255
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def to_page(
    title: str,
    model: StartModel,
    analysis: Analysis,
    imports: Iterable[ImportRow] = (),
    comparison: Mapping[str, Any] | None = None,
) -> str:
    """Return the HTML page of a start.

    Args:
        title: Title of the page.
        model: The start.
        analysis: Its analysis.
        imports: Slow imports of one process, as `imports_of` returns them.
        comparison: Difference from another start, as `bootseer report --json` shows it.
    """
    explained: dict[str, Any] = analysis_document(analysis)
    del explained["clocks"]["shift_s"]
    for name in ("stragglers", "missed_barriers"):
        explained[name] = explained[name][:_NAMED_NODES_MAX]
    document: dict[str, Any] = {
        "title": title,
        "analysis": explained,
        "straggler_count": len(analysis.stragglers),
        "causes": Counter(one.cause.name for one in analysis.stragglers).most_common(),
        "gantt": _gantt(model, analysis),
        "heat": _heat(model, analysis),
        "imports": [list(row) for row in imports],
        "comparison": comparison,
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    template = files(__package__).joinpath("start.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/null", text, 1)


def _gantt(model: StartModel, analysis: Analysis) -> list[dict[str, Any]]:
    """Return the processes of the Gantt chart, sorted by node, with their spans.

    These are the processes on the critical path, the slowest ones of the worst nodes, and two of a
    typical node.
    """
    on_path = {(one.node, one.rank, one.role) for one in analysis.path}
    slow = {
        (one.node, outlier.role, str(outlier.label))
        for one in analysis.stragglers
        for outlier in one.outliers
    }
    worst = {
        one.node: (number, {NO_RANK, *(outlier.rank for outlier in one.outliers[:2])})
        for number, one in enumerate(analysis.stragglers[:_GANTT_PROCESSES_MAX])
    }
    causes = {one.node: one.cause.name for one in analysis.stragglers}
    named = worst.keys() | {node for node, _, _ in on_path}
    typical = next((node for node in model.graph.nodes if node not in named), "")
    first = min(
        (
            rank
            for group in model.graph.groups
            for node, rank in zip(group.nodes, group.ranks, strict=True)
            if node == typical and rank != NO_RANK
        ),
        default=NO_RANK,
    )
    rows = []
    for group in model.graph.groups:
        # Hours in a queue would hide a start of minutes; the critical path shows them.
        if group.role in BEFORE_LAUNCHER:
            continue
        for row, (node, rank) in enumerate(zip(group.nodes, group.ranks, strict=True)):
            number, ranks = worst.get(node, (0, set()))
            if (node, rank, group.role) in on_path:
                order = -2
            elif node == typical and rank in (NO_RANK, first):
                order = -1
            elif rank in ranks:
                order = number
            else:
                continue
            rows.append((order, group.times[0][row], group, row))
    rows.sort(key=lambda one: one[:2])
    shown = rows[:_GANTT_PROCESSES_MAX]
    begins: dict[str, float] = {}
    for _, begin, group, row in shown:
        begins[group.nodes[row]] = min(begin, begins.get(group.nodes[row], begin))
    shown.sort(key=lambda one: (begins[one[2].nodes[one[3]]], one[2].nodes[one[3]], one[1]))
    return [
        {
            "name": process_name(group.nodes[row], group.ranks[row]),
            "role": group.role,
            "cause": causes.get(group.nodes[row], ""),
            "on_path": order == -2,
            "spans": _spans(group, row, model.before_s, slow),
        }
        for order, _, group, row in shown
    ]


def _spans(
    group: Group, row: int, began_s: float, slow: Collection[tuple[str, str, str]]
) -> list[list[Any]]:
    """Return name, begin, end, depth and kind of a process's longest spans.

    Kind 1 waits for other processes, kind 2 is slower than its peers, and all others are 0.
    """
    depths: list[int] = []
    found: list[list[Any]] = []
    for span, parent in enumerate(group.shape.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        begin = group.times[begin_of(span)][row] - began_s
        end = group.times[end_of(span)][row] - began_s
        waits = span in group.barriers or span in group.waited_for
        name = group.shape.names[span]
        is_slow = (group.nodes[row], group.role, str(group.shape.label(span))) in slow
        kind = 1 if waits else 2 if is_slow else 0
        found.append([name, round(begin, 3), round(end, 3), depths[-1], kind])
    longest = sorted(found, key=lambda one: float(one[1] - one[2]))[:_GANTT_SPANS_MAX]
    return sorted(longest, key=lambda one: (one[3], one[1]))


def _heat(model: StartModel, analysis: Analysis) -> dict[str, Any]:
    """Return the heat map: each node's time in each stage against the median, worst nodes first."""
    chosen = _stages(model)
    excess = {one.node: sum(o.excess_s for o in one.outliers) for one in analysis.stragglers}
    nodes = sorted(model.graph.nodes, key=lambda node: (-excess.get(node, 0.0), node))
    places = {node: number for number, node in enumerate(nodes)}
    cells = bytearray([_NO_CELL]) * (len(nodes) * len(chosen))
    columns = {key: number for number, key in enumerate(chosen)}
    values: dict[tuple[int, int], list[float]] = {}
    for interval in model.intervals.values():
        column = columns.get((interval.label, interval.group.role))
        if column is not None:
            for node, seconds in zip(interval.group.nodes, interval.seconds, strict=True):
                values.setdefault((places[node], column), []).append(seconds)
    for (place, column), found in values.items():
        key = chosen[column]
        base_s, median = base_of(key[0]), analysis.peers[key].median_s
        seconds = statistics.median(found)
        cells[place * len(chosen) + column] = _cell(seconds + base_s, median + base_s)
    return {
        "stages": [
            {
                "name": str(label),
                "role": role,
                "median_s": analysis.peers[label, role].median_s,
                "base_s": base_of(label),
            }
            for label, role in chosen
        ],
        "nodes": nodes,
        "cells": base64.b64encode(bytes(cells)).decode("ascii"),
    }


def _stages(model: StartModel) -> list[PeerGroup]:
    """Return the longest intervals in order of their begin."""
    begins: dict[PeerGroup, float] = {}
    for (group, event), interval in model.intervals.items():
        key = (interval.label, group.role)
        begins[key] = min(begins.get(key, math.inf), min(group.times[event]))
    least_s = _SHARE_MIN * model.measured_s
    worth = [key for key in begins if model.peers[key].max_s >= least_s]
    longest = sorted(worth, key=lambda key: -model.peers[key].max_s)[:_HEAT_STAGES_MAX]
    return sorted(longest, key=lambda key: begins[key])


def _cell(seconds: float, median: float) -> int:
    if seconds <= 0 or median <= 0:
        return _MEDIAN_CELL
    octaves = math.log2(seconds / median)
    return max(0, min(_NO_CELL - 1, round(_MEDIAN_CELL + _CELL_STEPS_PER_OCTAVE * octaves)))
