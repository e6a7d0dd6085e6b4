"""Forecast for a prepared start (`standby`), from the job's last start on this node."""

from collections.abc import Iterable
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.report.decoding import decode
from bootseer.served.service import CHECKPOINT, RUN, Service
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import START, Stage

_PREPARED = ("image", "environment", "checkpoint")
"""Stages whose work a standby does ahead, by the beginning of their names."""


def expected_s(settings: Settings) -> tuple[float, float] | None:
    """Return how long the last start took, and how much of that remains after a standby.

    None if this node knows no successful start of the job.
    """
    folder = settings.timeline_dir / settings.job
    files = sorted(folder.glob("*/*/*.jsonl"), key=_time_of, reverse=True)
    for file in files[:3]:
        try:
            stages = decode(file.read_bytes())
        except (BootseerError, OSError):
            continue
        for start in stages:
            if start.name == START and start.end_ns is not None and not start.failed:
                prepared = [one for one in stages if one.name.startswith(_PREPARED)]
                took_ns = start.end_ns - start.start_ns
                return took_ns / 1e9, (took_ns - _covered_ns(prepared, start.end_ns)) / 1e9
    return None


def warm_sentence(known: Service) -> str:
    """Return a sentence about the part of a checkpoint folder or image that is in memory.

    Empty for other kinds of mounts. Raises: BootseerError.
    """
    if known.state.purpose == CHECKPOINT:
        count = known.ask("status")["memory"]["used_bytes"]
        return f"{known.state.directory}: {count} bytes of checkpoints are in memory"
    if known.state.purpose != RUN:
        return ""
    figures = known.ask("status")
    bundle = figures["prefetch"]
    pages = "no start of it was recorded, so no pages are read ahead"
    if bundle is not None:
        where = "on their way into" if bundle["finished_after_s"] is None else "in"
        pages = f"{bundle['bundle_stream_bytes']} bytes that starts read are {where} memory"
    on_node = f"{figures['cached_bytes']} of {figures['image_bytes']} bytes are on this node"
    return f"{known.state.reference}: {on_node}; {pages}"


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _covered_ns(stages: Iterable[Stage], until_ns: int) -> int:
    covered_ns = end_ns = 0
    for one in sorted(stages, key=lambda stage: stage.start_ns):
        begin = max(one.start_ns, end_ns)
        end_ns = max(end_ns, min(one.end_ns or one.start_ns, until_ns))
        covered_ns += max(end_ns - begin, 0)
    return covered_ns
