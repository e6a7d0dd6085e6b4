"""Stages of a start as OpenTelemetry records, in one file per node and rank.

Public: `stage` and `ready`, which training code uses as `bootseer.stage` and `bootseer.ready`, and
`Timeline`, `Span`, `current`. They cost nothing if no timeline is written, never raise, and import
only the standard library and `bootseer.base`, `linux` and `served.ready_socket`. The file format is
docs/format/timeline.md; `bootseer.report` reads it.
"""

from bootseer.timeline.recorder import Span, Timeline, current, ready, stage

__all__ = ["Span", "Timeline", "current", "ready", "stage"]
