"""A stage as another program tells it, before it is known which node of a start it belongs to.

Files are hostile: they are bounded, and lines that cannot be read are left out. Pure (no I/O).
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from msgspec import Struct

from bootseer.report.graph import NO_RANK
from bootseer.timeline.otlp import Value

SIZE_MAX = 256 * 1024 * 1024
"""Of a file: the pods and events of 10,000 nodes are 100 MB."""
STAGES_MAX = 200_000
TEXT_MAX = 200
_LINE_MAX = 64 * 1024
_NS = 10**9
_TIME_MAX_NS = 2**63 - 1
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\d*(Z| ?UTC| ?[+-]\d\d:?\d\d)?"
)
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class Known(Struct, frozen=True, kw_only=True):
    """A stage that another program knows."""

    name: str
    role: str
    """The program: stages of one role on one node share a track."""
    begin_ns: int | None
    """Since 1970. None: only how long it took is known, and that it was inside the next of the
    rank's barriers that took as long."""
    end_ns: int | None
    """None: it has not ended."""
    clock: str = ""
    """Whose clock said so."""
    nodes: tuple[str, ...] = ()
    """Names of the node, or of the pod; none: all nodes."""
    unit: str = ""
    """The pod, container or submission. Of several of one node that which the start was begun by
    counts."""
    family: str = ""
    """What other units of the same job have in common: the owner of pods."""
    submission: str = ""
    """The submission that it is of, where the program knows this."""
    rank: int = NO_RANK
    process: str = ""
    """Tells the processes of one role on one node apart."""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    failed: bool = False
    message: str = ""
    attributes: Mapping[str, Value] = _NOTHING
    parts: tuple[tuple[str, float], ...] = ()
    """Names and seconds of what follows each other in a stage whose begin is not known."""


def lines(data: bytes) -> Iterator[str]:
    """The lines of a text file that are not too long to be what a parser looks for."""
    for line in data.splitlines():
        if len(line) <= _LINE_MAX:
            yield line.decode("utf-8", "replace")


def clean(text: object) -> str:
    """A name as another program gave it, of bounded length; empty where it is no text."""
    return text[:TEXT_MAX] if isinstance(text, str) else ""


def instant(text: object) -> int | None:
    """Nanoseconds since 1970 of a time as programs write it: seconds since 1970, or a date and a
    time; without a zone it is this machine's. None where it is neither."""
    if isinstance(text, int | float) or (isinstance(text, str) and text.isdecimal()):
        seconds = float(text) if len(str(text)) <= 20 else 0.0
        return int(seconds) * _NS if 0 < seconds < _TIME_MAX_NS / _NS else None
    found = _ISO.match(text) if isinstance(text, str) else None
    if found is None:
        return None
    date, time, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(f"{date}T{time}{_offset(zone)}")
        whole = int(moment.timestamp())
    except (ValueError, OverflowError):
        return None
    return whole * _NS + int((fraction or "").ljust(9, "0")) if whole > 0 else None


def _offset(zone: str | None) -> str:
    if not zone:
        return ""
    zone = zone.strip()
    return "+00:00" if zone in ("Z", "UTC") else zone
