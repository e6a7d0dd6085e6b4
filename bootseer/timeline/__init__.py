"""Stages of a start as OpenTelemetry records, one file per node and rank.

`stage` and `ready` are what training code uses (as `bootseer.stage`, `bootseer.ready`). They cost
nothing when no timeline is being written, never raise, and import nothing heavy. The file format
is docs/format/timeline.md; `bootseer.report` reads it, and says where the time went.
"""

from bootseer.timeline.recorder import Span, Timeline, current, ready, stage

__all__ = ["Span", "Timeline", "current", "ready", "stage"]
