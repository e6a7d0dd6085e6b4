"""Reads all timelines of a start into its graph, in several processes."""

import functools
import logging
from collections.abc import Iterator

from bootseer.profile.adapters.placing import Placement
from bootseer.profile.files import StartFiles
from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.tracks import tracks_of
from bootseer.profile.parallel import in_order

_log = logging.getLogger(__name__)
_NODES_A_PART = 128
# Of 4 million stages the graph takes a gigabyte. No start has many more.
_STAGES_MAX = 12_000_000


def read_graph(
    files: StartFiles, process_count: int | None = None, others: Placement | None = None
) -> StartGraph:
    """The graph of a start, the same for any number of processes; `others` has what other programs
    know of it. Raises: BootseerError."""
    graph = StartGraph()
    parts = files.parts(_NODES_A_PART)
    if not files.are_here:
        process_count = 1
    # Seconds since 1970 as doubles would be off by microseconds.
    first = next((stages for part in parts for stages in part.nodes() if stages), None)
    if first is None:
        return graph
    read = functools.partial(_read_part, first[0].start_ns, others)
    for number, part in enumerate(in_order(read, parts, process_count)):
        graph.merge(part)
        if graph.stage_count > _STAGES_MAX and number + 1 < len(parts):
            _log.warning(
                "warning: only %d of the nodes are reported: the start has more than %d million "
                "stages",
                len(graph.nodes),
                _STAGES_MAX // 1_000_000,
            )
            break
    for stages in others.never_began(graph.nodes, first[0]) if others else ():
        for track in tracks_of(stages, first[0].start_ns):
            graph.add(track)
    return graph


def read_events(files: StartFiles, event: str) -> Iterator[str]:
    """The bodies of the events of this name. Raises: BootseerError."""
    parts = files.parts(_NODES_A_PART)
    for found in in_order(lambda part: part.events(event), parts, None if files.are_here else 1):
        yield from found


def _read_part(origin_ns: int, others: Placement | None, part: StartFiles) -> StartGraph:
    graph = StartGraph()
    for stages in part.nodes():
        graph.add_node([*stages, *others.of(stages)] if others else stages, origin_ns)
    return graph
