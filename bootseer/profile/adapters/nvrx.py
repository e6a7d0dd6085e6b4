"""The events of NVIDIA's resiliency extension (nvidia-resiliency-ext) in its log. Pure (no I/O).

`FaultToleranceProfiler.record_event` of its shared_utils/profiling.py writes one line an event:
"- Cycle: C Event: E Node: HOST_PID_NUMBER Rank: R Time: T UTC", by the node's own clock.
"""

import re

from bootseer.profile.adapters.known import STAGES_MAX, Known, instant, lines

ROLE = "NVRx"
_LINE = re.compile(
    r"- Cycle: (\d{1,9}) Event: (\w{1,40}) Node: (\S{1,253}) Rank: (\S{1,20}) "
    r"Time: (\S{10} \S{8,20}) UTC"
)
_NODE = re.compile(r"(.+)_\d+_\d+")
# The event that ends a stage, the one that begins it, the stage, and the stage that it is part of.
_STAGES = {
    "rendezvous_completed": ("rendezvous_started", "NVRx rendezvous", ""),
    "health_check_completed": ("rendezvous_started", "NVRx health check", "rendezvous_completed"),
    "worker_start_completed": ("worker_start_started", "NVRx worker start", ""),
}


def parse_nvrx(data: bytes) -> list[Known]:
    """Rendezvous, health checks and starts of workers, in each cycle of each node."""
    found: list[Known] = []
    begun: dict[tuple[str, str, str], int] = {}
    for line in lines(data):
        match = _LINE.search(line)
        when = instant(f"{match[5]} UTC") if match else None
        if match is None or when is None:
            continue
        cycle, event, agent = match[1], match[2], match[3]
        begun.setdefault((agent, cycle, event), when)
        if event not in _STAGES:
            continue
        first, name, whole = _STAGES[event]
        begin = begun.get((agent, cycle, first))
        if begin is None or len(found) >= STAGES_MAX:
            continue
        node = _NODE.fullmatch(agent)
        place = f"{agent} {cycle}"
        found.append(
            Known(
                name=name,
                role=ROLE,
                begin_ns=begin,
                end_ns=max(begin, when),
                clock="node",
                nodes=(node[1] if node else agent,),
                span_id=f"{place} {event}",
                parent_id=f"{place} {whole}" if whole else "",
            )
        )
    return found
