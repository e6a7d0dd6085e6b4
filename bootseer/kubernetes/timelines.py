"""What a node's daemons do for a pod as a stage of that pod's start, where reports of that start
find it: in the store and at the collector. Any thread.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from bootseer.kubernetes.pod_start import PodStart
from bootseer.profile.publish.begin import Note, is_stored
from bootseer.profile.publish.round import publish
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def noted(settings: Settings, start: PodStart, part: str) -> Iterator[Timeline | None]:
    """The timeline of one of a pod's parts, which is published when the block ends; nobody waits
    for that. None where nothing says which start the pod is of. `part` is the part's name in the
    pod: that of the pod that takes this one's place is its own."""
    if not start.job:
        yield None
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
        part=hashlib.sha256(part.encode()).hexdigest()[:8],
    ).with_resource(
        {
            "k8s.pod.name": start.pod,
            "k8s.pod.uid": start.uid,
            "k8s.namespace.name": start.namespace,
        }
    )
    try:
        yield timeline
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
    if is_stored(note.settings) and not problems:
        _remove(note.timeline, note.settings.timeline_dir)


def _remove(path: Path, top: Path) -> None:
    """Remove what the store has: nobody tidies up on a node after its pods."""
    with contextlib.suppress(OSError):
        path.unlink()
        for folder in path.parents:
            if folder == top:
                break
            folder.rmdir()
