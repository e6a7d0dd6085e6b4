"""Round of publishing: sends the node's timelines to the store, the metrics file and the collector.

Runs in a copy of the process that has the duty (`duty`). A failure is reported and tried again in
the next round; nobody waits for a round.
"""

import os
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError
from bootseer.fanout.gathering import hand_over
from bootseer.profile.publish.collector import send
from bootseer.profile.publish.endpoints import endpoints
from bootseer.profile.publish.note import LauncherNote, RoundResult, is_stored
from bootseer.profile.publish.outgoing import TimelineLine, encode, outgoing
from bootseer.profile.publish.start_figures import render_start
from bootseer.report.decoding import decode
from bootseer.report.sources import pack
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.store import open_own_store
from bootseer.timeline.stored import key_of


def publish(
    notes: Sequence[LauncherNote], sent: Mapping[str, int], figures: FiguresFile | None = None
) -> RoundResult:
    """Publish the timelines of these launchers; `sent` says how much of them the collector has."""
    problems: dict[str, str] = {}
    lines = list(outgoing(note.timeline for note in notes))
    try:
        if is_stored(notes[0].settings):
            _store(notes[0], lines)
    except (BootseerError, OSError) as error:
        problems["the store"] = str(error)
    if figures is not None:
        stages = decode(encode(lines))
        job = notes[0].settings.job
        figures.write(file_name("start", job), lambda slot: render_start(stages, job, slot))
    offsets: dict[str, int] = {}
    for endpoint in endpoints(os.environ):
        done = send(endpoint, lines, sent)
        offsets |= done.offsets
        if done.problem:
            problems[f"the collector of {endpoint.signal}"] = done.problem
    return RoundResult(offsets, problems)


def _store(note: LauncherNote, lines: Sequence[TimelineLine]) -> None:
    """Store a node's timelines: in an object that another node gathers, or in one of their own."""
    settings = note.settings
    name, packed = note.timeline.stem, pack(encode(lines))
    if hand_over(settings, name, packed):
        return
    key = key_of(settings.job, settings.submission, settings.attempt, name)
    with open_own_store(settings) as store:
        store.publish(key, packed, replace=True)
