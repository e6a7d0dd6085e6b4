"""The mount of a volume as a stage of its pod's start, where reports of that start find it: in the
node's folder of timelines, and from there in the store and at the collector. Any thread.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from bootseer.kubernetes.csi.attributes import Start, Volume
from bootseer.profile.publish.begin import Note
from bootseer.profile.publish.round import publish
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def told(settings: Settings, start: Start, volume: Volume, target: Path) -> Iterator[None]:
    """Note what the block does for a pod that says which start it is of. Nobody waits for its
    publication."""
    if not start.job:
        yield
        return
    settings = replace(
        settings,
        job=start.job,
        submission=start.submission,
        attempt=start.attempt,
        rank=start.rank,
    )
    timeline = Timeline.start(
        settings.timeline_dir,
        job=start.job,
        submission=start.submission,
        attempt=start.attempt,
        node=settings.node,
        rank=start.rank,
        # The volume's name in the pod: that of the pod that takes this one's place is its own.
        part=hashlib.sha256(target.parent.name.encode()).hexdigest()[:8],
    ).with_resource(
        {
            "k8s.pod.name": start.pod,
            "k8s.pod.uid": start.uid,
            "k8s.namespace.name": start.namespace,
        }
    )
    kind = type(volume).__name__.removesuffix("Volume").lower()
    try:
        with timeline.span(f"{kind} volume"):
            yield
    finally:
        note = Note(settings, timeline.path, os.getpid(), "", "")
        threading.Thread(target=_publish, args=(note,), name="timeline", daemon=True).start()


def _publish(note: Note) -> None:
    try:
        problems = publish([note], {}).problems
    except Exception:
        # It is missing in a report, no more.
        _log.exception("the timeline %s stays on this node", note.timeline)
        return
    for who, problem in problems.items():
        _log.warning("%s does not take the timeline %s: %s", who, note.timeline, problem)
