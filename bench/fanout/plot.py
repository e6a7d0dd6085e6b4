"""Plot of docs/scale.md: time of the slowest node over the number of nodes, as SVG."""

import math
from collections.abc import Sequence

from bench.reporting.result import Result

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 320, 60, 20, 20, 50
_NODES_MAX, _RATIO_MAX = 10_000, 2.0
_Point = tuple[int, float]


def scale_plot(result: Result) -> str:
    """Return the plot of a result of the case `fanout`. Pure."""
    figures = {run.variant: run.figures for run in result.runs}
    alone_s = figures["1 node"]["wall_s"]
    measured = [(1, 1.0)]
    simulated = []
    for name, values in figures.items():
        count, _, kind = name.replace(",", "").partition(" ")
        if kind == "nodes":
            measured.append((int(count), values["wall_s"] / alone_s))
        elif kind == "simulated":
            simulated.append((int(count), values["times_alone"]))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for ratio in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
        y = _y(ratio)
        lines.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{ratio:.1f}</text>')
    for nodes in (1, 4, 16, 64, 256, 1024, _NODES_MAX):
        place = f'x="{_x(nodes)}" y="{_HEIGHT - _BOTTOM + 18}"'
        lines.append(f'<text {place} text-anchor="middle">{nodes:,}</text>')
    lines += _series(sorted(measured), "#1f77b4", "measured", 1)
    lines += _series(sorted(simulated), "#d62728", "simulated", 2)
    middle = f'x="{_WIDTH / 2}" y="{_HEIGHT - 12}"'
    lines.append(f'<text {middle} text-anchor="middle">nodes of the job</text>')
    lines.append(f'<text x="{_LEFT}" y="14">slowest node, as a multiple of one node alone</text>')
    return "\n".join([*lines, "</svg>", ""])


def _series(points: Sequence[_Point], color: str, name: str, row: int) -> list[str]:
    path = " ".join(f"{_x(count)},{_y(ratio)}" for count, ratio in points)
    dots = [
        f'<circle cx="{_x(count)}" cy="{_y(ratio)}" r="3" fill="{color}"/>'
        for count, ratio in points
    ]
    legend = f'<text x="{_LEFT + 10}" y="{_TOP + 16 * row}" fill="{color}">{name}</text>'
    return [f'<polyline points="{path}" fill="none" stroke="{color}"/>', *dots, legend]


def _x(count: int) -> float:
    share = math.log(count) / math.log(_NODES_MAX)
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(ratio: float) -> float:
    share = (min(ratio, _RATIO_MAX) - 1) / (_RATIO_MAX - 1)
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 1)
