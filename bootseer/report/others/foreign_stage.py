"""Stage from another program, before it is assigned to a node of the start. Pure (no I/O).

Files are hostile: their size is bounded, and lines that do not parse are skipped.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from msgspec import Struct

from bootseer.report.graph import NO_RANK
from bootseer.timeline.otlp import Value

SIZE_MAX = 256 * 1024 * 1024
"""Largest file that is read: pods and events of 10,000 nodes are 100 MB."""
STAGES_MAX = 200_000
TEXT_MAX = 200
_LINE_MAX = 64 * 1024
_NS = 10**9
_TIME_MAX_NS = 2**63 - 1
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?\d*(Z| ?UTC| ?[+-]\d\d:?\d\d)?"
)
_NOTHING: Mapping[str, Value] = MappingProxyType({})


class ForeignStage(Struct, frozen=True, kw_only=True):
    """Stage that another program noted."""

    name: str
    role: str
    """Program: stages of one role on one node share a track."""
    begin_ns: int | None
    """Begin since 1970. None if only the duration is known: the stage is then placed at the end
    of the rank's next barrier that took at least as long."""
    end_ns: int | None
    """End since 1970; None if the stage has not ended."""
    clock: str = ""
    """Program whose clock the times are from."""
    nodes: tuple[str, ...] = ()
    """Names of the node or pod; empty if the stage belongs to all nodes."""
    unit: str = ""
    """Pod, container or submission. Only the node's last unit before the launcher counts."""
    family: str = ""
    """Owner of the pod, the same for all pods of a job."""
    submission: str = ""
    """Submission, if the program knows it."""
    rank: int = NO_RANK
    process: str = ""
    """Process, to distinguish several of one role on one node."""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    failed: bool = False
    message: str = ""
    attributes: Mapping[str, Value] = _NOTHING
    parts: tuple[tuple[str, float], ...] = ()
    """Names and seconds of consecutive parts of a stage whose begin is unknown."""


def lines(data: bytes) -> Iterator[str]:
    """Yield the lines of a text file, without lines longer than any that a parser looks for."""
    for line in data.splitlines():
        if len(line) <= _LINE_MAX:
            yield line.decode("utf-8", "replace")


def clean(text: object) -> str:
    """Return a name cut to `TEXT_MAX` characters; empty if `text` is not a string."""
    return text[:TEXT_MAX] if isinstance(text, str) else ""


def instant(text: object) -> int | None:
    """Parse seconds since 1970, or date and time, to ns since 1970; return None for anything else.

    A time without a zone is in this machine's zone.
    """
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
