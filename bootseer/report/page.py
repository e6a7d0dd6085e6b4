"""An explained start as one HTML file that needs no network. Pure but for its own template.

The file holds its data as JSON; `start.html` draws it. Names come from nodes and programs and are
hostile: JSON is escaped for HTML, and the page inserts text only as text.
"""

import base64
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from bootseer.report.explain import Analysis, StartModel
from bootseer.report.export import analysis_document
from bootseer.report.graph import BEFORE_LAUNCHER, NO_RANK, Group, begin_of, end_of
from bootseer.report.peers import Who, base_of

ImportRow = tuple[str, int, int, int]
"""Module, depth, begin and duration in microseconds."""

_GANTT_PROCESSES_MAX = 40
_GANTT_SPANS_MAX = 80
_HEAT_STAGES_MAX = 30
_NAMED_NODES_MAX = 200
# Stages that take nowhere more of the start than this have no column.
_SHARE_MIN = 0.005
# A cell of the heat map is a byte: 64 is the median, 32 more is twice as long.
_MEDIAN_CELL, _CELLS_AN_OCTAVE, _NO_CELL = 64, 32, 255
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def to_page(
    title: str,
    model: StartModel,
    analysis: Analysis,
    imports: Iterable[ImportRow] = (),
    comparison: Mapping[str, Any] | None = None,
) -> str:
    """The HTML of one start; `comparison` says how it differs from another one."""
    explained: dict[str, Any] = analysis_document(analysis)
    del explained["clocks"]["shift_s"]
    for name in ("stragglers", "missed_barriers"):
        explained[name] = explained[name][:_NAMED_NODES_MAX]
    document: dict[str, Any] = {
        "title": title,
        "analysis": explained,
        "straggler_count": len(analysis.stragglers),
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
    """Processes on the critical path, the slow ones of the worst nodes, and two of a typical one;
    those of a node together, with their stages."""
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
        # It would be a line of hours for a start of minutes: the critical path has it.
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
            "name": f"{group.nodes[row]}{f'/{group.ranks[row]}' if group.ranks[row] >= 0 else ''}",
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
    """Name, begin, end, depth, and what it is: 1 where others are waited for, 2 where the node was
    slower than its peers, else 0. The longest ones."""
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
    """Each node's time in each stage against the median, as bytes; the worst nodes first."""
    chosen = _stages(model)
    excess = {one.node: sum(o.excess_s for o in one.outliers) for one in analysis.stragglers}
    nodes = sorted(model.graph.nodes, key=lambda node: (-excess.get(node, 0.0), node))
    places = {node: number for number, node in enumerate(nodes)}
    cells = bytearray([_NO_CELL]) * (len(nodes) * len(chosen))
    columns = {key: number for number, key in enumerate(chosen)}
    values: dict[tuple[int, int], list[float]] = {}
    for piece in model.pieces.values():
        column = columns.get((piece.label, piece.group.role))
        if column is not None:
            for node, seconds in zip(piece.group.nodes, piece.seconds, strict=True):
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


def _stages(model: StartModel) -> list[Who]:
    """The pieces of time that take longest, in the order in which they begin."""
    begins: dict[Who, float] = {}
    for (group, event), piece in model.pieces.items():
        key = (piece.label, group.role)
        begins[key] = min(begins.get(key, math.inf), min(group.times[event]))
    least_s = _SHARE_MIN * model.measured_s
    worth = [key for key in begins if model.peers[key].max_s >= least_s]
    longest = sorted(worth, key=lambda key: -model.peers[key].max_s)[:_HEAT_STAGES_MAX]
    return sorted(longest, key=lambda key: begins[key])


def _cell(seconds: float, median: float) -> int:
    if seconds <= 0 or median <= 0:
        return _MEDIAN_CELL
    octaves = math.log2(seconds / median)
    return max(0, min(_NO_CELL - 1, round(_MEDIAN_CELL + _CELLS_AN_OCTAVE * octaves)))


def imports_of(bodies: Iterable[str]) -> Sequence[ImportRow]:
    """The imports of the node that spent most time in them; what cannot be read is left out."""
    best: list[ImportRow] = []
    for body in bodies:
        try:
            rows = msgspec.json.decode(body, type=list[ImportRow])
        except (ValueError, RecursionError):
            continue
        if sum(row[3] for row in rows if row[1] == 0) > sum(row[3] for row in best if row[1] == 0):
            best = rows
    return best
