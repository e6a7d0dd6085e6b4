"""Spans and events of other programs in OTLP/JSON, as the Collector writes it. Pure (no I/O).

A file has one request, or one on each line. What Bootseer itself has written is left out.
"""

from bootseer.report.decoding import decode_any
from bootseer.report.others.known import STAGES_MAX, Known, clean
from bootseer.timeline.otlp import Stage

_OURS = "bootseer"
_NODE = ("host.name", "k8s.node.name", "k8s.pod.name")
_PROCESS = ("service.instance.id", "process.pid")


def parse_spans(data: bytes) -> list[Known]:
    """Each span, and each log record that is an event."""
    stages = (stage for stage in decode_any(data) if stage.resource.get("service.name") != _OURS)
    return [_known(stage) for stage, _ in zip(stages, range(STAGES_MAX), strict=False)]


def _known(stage: Stage) -> Known:
    resource = stage.resource
    end_ns = stage.end_ns
    return Known(
        name=clean(stage.name),
        role=clean(resource.get("service.name")) or "OTLP",
        begin_ns=stage.start_ns,
        end_ns=None if end_ns is None else max(stage.start_ns, end_ns),
        nodes=tuple(str(resource[name])[:253] for name in _NODE if name in resource),
        process=" ".join(str(resource[name])[:100] for name in _PROCESS if name in resource),
        trace_id=stage.trace_id,
        span_id=stage.span_id,
        parent_id=stage.parent_id,
        failed=stage.failed,
        message=clean(stage.message),
        attributes=stage.attributes,
    )
