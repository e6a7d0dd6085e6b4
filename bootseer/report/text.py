"""Explanation of a start as lines for a terminal: one screen for any number of nodes. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from bootseer.report.explain import Analysis
from bootseer.report.graph import LAUNCHER, process_name
from bootseer.report.path import PathSegment

# Segments with a smaller share of the critical path are summed up.
_SHARE_MIN = 0.02
_PATH_MAX = 12
_BLAME_MAX = 5
_LOST_MAX = 3
_STRAGGLERS_MAX = 8
_LATE_MIN_S = 0.1
_MISSED_MAX = 5
_NAMED_MAX = 8
_SERVERS = {"namenode": "NameNode", "bucket": "bucket", "http": "registry or web server"}
# Smaller figures are shown in GPU-seconds: two decimals of an hour would be "0.00".
_GPU_HOURS_MIN = 0.1


def explain(analysis: Analysis) -> Iterator[str]:
    """Yield the critical path, the barriers, the stragglers with causes, and the what-ifs."""
    yield from _delay(analysis)
    yield from _section("Who never came", _missed(analysis))
    yield from _path(analysis)
    yield from _section("Who held the others", _blame(analysis))
    yield from _section("Slower than their peers", _stragglers(analysis))
    since = ", since it was submitted" if analysis.before_s else ""
    yield from _section(f"What it would have been{since}", _what_ifs(analysis))
    yield from _section("What it asked of shared servers", _services(analysis))
    yield from _clocks(analysis)


def headline(analysis: Analysis) -> str:
    """Return one sentence: the time until the last process was ready."""
    if analysis.is_ready:
        if not analysis.before_s:
            return f"ready after {analysis.ready_s:.1f} s"
        submitted_s = analysis.before_s + analysis.ready_s
        return f"ready after {analysis.ready_s:.1f} s, {submitted_s:.1f} s after it was submitted"
    return (
        "not ready: no process took an optimizer step or called bootseer.ready(); the last stage "
        f"noted ended after {analysis.ready_s:.1f} s"
    )


def _delay(analysis: Analysis) -> Iterator[str]:
    if (one := analysis.delay) is not None:
        why = f"{one.cause.name}: {one.cause.evidence}" if one.cause.evidence else one.cause.name
        line = f"held by {process_name(one.node, one.rank)} in {one.stage}: {one.seconds:.1f} s, "
        line += f"{_gpu_time(one.gpu_hours)} ({why})"
        if one.alone_s < 0.8 * one.seconds:
            line += f"; other nodes are slow, too: alone it costs {one.alone_s:.1f} s"
        yield ""
        yield line


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    lines = list(lines)
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _path(analysis: Analysis) -> Iterator[str]:
    shown, rest_s = _shortened(analysis)
    lines = [f"{one.seconds:8.2f} s  {_of(one)}" for one in shown]
    if lines and rest_s:
        lines.append(f"{rest_s:8.2f} s  shorter ones together")
    yield from _section("Critical path", lines)


def _shortened(analysis: Analysis) -> tuple[list[PathSegment], float]:
    """Return the segments worth a line, in order, and the seconds of all others."""
    least = _SHARE_MIN * analysis.ready_s
    worth = sorted(analysis.path, key=lambda one: -one.seconds)[:_PATH_MAX]
    shown = [one for one in analysis.path if one in worth and one.seconds >= least]
    return shown, sum(one.seconds for one in analysis.path) - sum(one.seconds for one in shown)


def _of(segment: PathSegment) -> str:
    role = "" if segment.role == LAUNCHER else f" ({segment.role})"
    return f"{segment.label} on {process_name(segment.node, segment.rank)}{role}"


def _missed(analysis: Analysis) -> Iterator[str]:
    for one in analysis.missed[:_MISSED_MAX]:
        count = f"{one.came_count} of {one.expected_count}" if one.expected_count else "not all"
        apart = f" {one.spread_s:.1f} s apart" if len(one.gave_up) > 1 else ""
        line = f"{one.barrier}: {count} came{apart}; {_named(one.gave_up)} gave up after "
        line += f"{one.waited_s:.1f} s" if len(one.gave_up) == 1 else f"up to {one.waited_s:.1f} s"
        if one.absent:
            line += f"; never came: {_named(one.absent)}"
        unseen = one.expected_count - one.came_count - len(one.absent)
        if unseen > 0:
            line += f"; {unseen} more noted no start"
        yield line
    if len(analysis.missed) > _MISSED_MAX:
        yield f"and {len(analysis.missed) - _MISSED_MAX} more barriers (--json lists all)"


def _named(processes: Sequence[str]) -> str:
    more = len(processes) - _NAMED_MAX
    shown = list(processes[:_NAMED_MAX])
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)


def _blame(analysis: Analysis) -> Iterator[str]:
    causes = {one.node: one.cause for one in analysis.stragglers}
    held = [one for one in analysis.blame if one.late_s >= _LATE_MIN_S]
    for one in sorted(held, key=lambda one: -one.late_s)[:_BLAME_MAX]:
        where = ", ".join(f"{lost.label} {lost.seconds:.1f} s" for lost in one.lost[:_LOST_MAX])
        cause = causes.get(one.node)
        why = f"; {cause.name}: {cause.evidence}" if cause and cause.evidence else ""
        yield (
            f"{one.barrier}: {process_name(one.node, one.rank)} came {one.late_s:.1f} s after the "
            f"median" + (f" (lost in {where}{why})" if where else "")
        )


def _stragglers(analysis: Analysis) -> Iterator[str]:
    found = sorted(analysis.stragglers, key=lambda one: -one.lost_s)
    for one in found[:_STRAGGLERS_MAX]:
        worst = one.outliers[0]
        why = f": {one.cause.evidence}" if one.cause.evidence else ""
        yield (
            f"{one.node}: {worst.label} took {worst.seconds:.1f} s, median {worst.peers_s:.1f} s; "
            f"{one.cause.name}{why}"
        )
    if len(found) > _STRAGGLERS_MAX:
        yield f"and {len(found) - _STRAGGLERS_MAX} more nodes (--json lists all)"


def _what_ifs(analysis: Analysis) -> Iterator[str]:
    for one in sorted(analysis.what_ifs, key=lambda one: -one.saved_s):
        if one.saved_s >= 0.005 * analysis.ready_s:
            yield (
                f"{one.ready_s:8.2f} s  {one.name}  (-{one.saved_s:.1f} s, "
                f"-{_gpu_time(one.saved_gpu_hours)})"
            )
    yield f"the unchanged start replayed: {analysis.replay_error_s:+.3f} s off"


def _services(analysis: Analysis) -> Iterator[str]:
    for one in analysis.requests:
        yield (
            f"{_SERVERS[one.kind]}: {one.median_count:g} requests of a node (median), at most "
            f"{one.max_count} ({one.max_node})"
        )
    if (found := analysis.fan_out) is not None:
        each = found.received_bytes / found.node_count / 1e6
        yield (
            f"fan-out: {found.node_count} nodes received {each:.1f} MB each, of which the store "
            f"sent {found.copies:.2f} copies"
        )


def _gpu_time(hours: float) -> str:
    if hours < _GPU_HOURS_MIN:
        return f"{3600 * hours:.1f} GPU-seconds"
    return f"{hours:.2f} GPU-hours"


def _clocks(analysis: Analysis) -> Iterator[str]:
    shifts = analysis.clocks.shift_s
    off = {node: shift for node, shift in shifts.items() if abs(shift) >= 1}
    if off and len(shifts) == 2:
        first, second = sorted(shifts, key=lambda node: shifts[node])
        yield ""
        yield (
            f"the clock of {first} is {shifts[second] - shifts[first]:.0f} s ahead of that of "
            f"{second}; corrected at barriers"
        )
    elif off:
        worst = max(off, key=lambda node: abs(off[node]))
        yield ""
        yield (
            f"clocks of {len(off)} nodes are off by a second or more (most: {worst}, "
            f"{-off[worst]:+.0f} s); corrected at barriers"
        )
    if analysis.clocks.apart and analysis.node_count > 1:
        count = len(analysis.clocks.apart)
        yield f"{count} nodes met no other: how far their clocks are off is unknown"
