"""What a start that is held needs yet: judged by the last start of the job on this node."""

from collections.abc import Iterable
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.report.decoding import decode
from bootseer.served.folders import CHECKPOINT, RUN
from bootseer.served.status import Known
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import START, Stage

_HELD = ("image", "environment", "checkpoint")


def expected_s(settings: Settings) -> tuple[float, float] | None:
    """How long the last start took until its command, and how much of that is left when what it
    mounted is live; None where the node knows of no start."""
    folder = settings.timeline_dir / settings.job
    files = sorted(folder.glob("*/*/*.jsonl"), key=_time_of, reverse=True)
    for file in files[:3]:
        try:
            stages = decode(file.read_bytes())
        except (BootseerError, OSError):
            continue
        for start in stages:
            if start.name == START and start.end_ns is not None and not start.failed:
                held = [one for one in stages if one.name.startswith(_HELD)]
                took_ns = start.end_ns - start.start_ns
                return took_ns / 1e9, (took_ns - _covered_ns(held, start.end_ns)) / 1e9
    return None


def held_sentence(known: Known) -> str:
    """What of a checkpoint folder or an image is warm; "" of others. Raises: BootseerError."""
    if known.state.purpose == CHECKPOINT:
        count = known.ask("status")["memory"]["used_bytes"]
        return f"{known.state.directory}: {count} bytes of checkpoints are in memory"
    if known.state.purpose != RUN:
        return ""
    figures = known.ask("status")
    bundle = figures["prefetch"]
    pages = "no start of it was recorded, so no pages are read ahead"
    if bundle is not None:
        # An error is in the table.
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
    """The time in which at least one of the stages ran. Pure."""
    covered_ns = end_ns = 0
    for one in sorted(stages, key=lambda stage: stage.start_ns):
        begin = max(one.start_ns, end_ns)
        end_ns = max(end_ns, min(one.end_ns or one.start_ns, until_ns))
        covered_ns += max(end_ns - begin, 0)
    return covered_ns
