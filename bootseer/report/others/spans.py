"""Parser of spans and events in OTLP/JSON, as the OpenTelemetry Collector writes it. Pure (no I/O).

A file is one export request, or has one per line. Stages that Bootseer wrote are skipped.
"""

from bootseer.report.decoding import decode_any
from bootseer.report.others.foreign_stage import STAGES_MAX, ForeignStage, clean
from bootseer.timeline.otlp import Stage

_OURS = "bootseer"
_NODE = ("host.name", "k8s.node.name", "k8s.pod.name")
_PROCESS = ("service.instance.id", "process.pid")


def parse_spans(data: bytes) -> list[ForeignStage]:
    """Return each span, and each log record that is an event."""
    stages = (stage for stage in decode_any(data) if stage.resource.get("service.name") != _OURS)
    return [_known(stage) for stage, _ in zip(stages, range(STAGES_MAX), strict=False)]


def _known(stage: Stage) -> ForeignStage:
    resource = stage.resource
    end_ns = stage.end_ns
    return ForeignStage(
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
