"""One start of a job: image, environment and checkpoint stages, then `exec` of the command.

Alone decides what overlaps and what happens when a part fails. The image and the environments
follow each other, since an environment may be set up inside the image; the checkpoints are
mounted, and begin to warm up, meanwhile. `exec` replaces this process, so signals, the exit code
and PID 1 behaviour are the command's own. Servers that a stage started watch this process id,
which is then the command's.

Main thread only: it forks and handles signals.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from bootseer import loaded_ns
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.launch.attendant import Attendant
from bootseer.launch.checkpoints import CheckpointMounts
from bootseer.launch.job import Job, setup_command
from bootseer.launch.place import Place, open_place
from bootseer.launch.setups import set_up
from bootseer.launch.signals import StoppedError, StopSignals, end_by, hand_over
from bootseer.launch.submission import choose_submission
from bootseer.linux.scripts import execute
from bootseer.settings.config import FANOUT_KEY, Settings, is_default_store
from bootseer.timeline.otlp import START
from bootseer.timeline.recorder import FILE_VARIABLE, Span, Timeline

if TYPE_CHECKING:
    from bootseer.launch.caches.run import KeptCaches

Say = Callable[[str], None]
"""Gets one sentence for people at a time."""


def launch(settings: Settings, job: Job, say: Say) -> NoReturn:
    """Start `job` and become it: this returns only by an exception.

    A signal meanwhile ends what was begun, and then this process.

    Raises: SetupFailedError with the exit code of a set-up that failed, or 126 or 127 where the
    command cannot be started; BootseerError where the image or a checkpoint cannot be had at all.
    """
    # Before anything is begun: what cannot be read is known now.
    setups = [setup_command(line) for line in job.setups]
    try:
        with StopSignals():
            # A store that does not answer costs a start its deadline once, and not once a stage.
            WAIT_BUDGET.limit(settings.deadline_s)
            _start(settings, job, setups, say)
    except StoppedError as stopped:
        say(f"the start was {stopped}")
        end_by(stopped.number)


def _start(settings: Settings, job: Job, setups: list[list[str]], say: Say) -> NoReturn:
    # The command does not get it.
    secret = os.environ.pop(FANOUT_KEY, "")
    if not settings.submission:
        settings = replace(settings, submission=choose_submission(settings, job.command))
    timeline = Timeline.start(
        settings.timeline_dir,
        job=settings.job,
        submission=settings.submission,
        attempt=settings.attempt,
        node=settings.node,
        rank=settings.rank,
    )
    keeps = bool(job.kept) or (settings.keep_caches and not is_default_store(settings))
    attendant = Attendant(settings, say)
    checkpoints = CheckpointMounts(settings, job.checkpoints, say, aside=bool(job.image))
    place: Place | None = None
    attendant.begin(timeline, keeps=keeps)
    try:
        with timeline.span(START, since_ns=loaded_ns) as start:
            # Servers started on the way, the set-ups and the command write to it, too.
            os.environ.update(_environment(settings, timeline, start))
            has_fanout = False
            if _may_have_members(settings):
                from bootseer.launch.fanout import begin_fanout

                has_fanout = begin_fanout(settings, job.command, secret, say)
            # From here on: whether there is one to be asked.
            settings = replace(settings, fanout=has_fanout)
            stages = timeline.below(start)
            checkpoints.start()
            place = open_place(settings, job, stages, say)
            if place.is_image:
                # Once it is entered, no mount of the host comes in any more.
                for source, target in checkpoints.finish():
                    place.bind(source, target)
            for number, line in enumerate(setups):
                # A set-up may take long, and be for nothing.
                checkpoints.check()
                name = "environment" if len(setups) == 1 else f"environment {number + 1}"
                with stages.span(name) as span:
                    # In the namespace that is left nothing more is mounted for this job.
                    before = checkpoints.finish
                    below = stages.below(span)
                    set_up(settings, job, line, place, below, span, say, before_own_view=before)
            place.enter()
            # Behind the environments, which say what versions there are.
            caches = _restore_caches(settings, job, place, stages, say)
            command = _preload(settings, job, place, timeline, say) if job.preload else job.command
            checkpoints.finish()
            attendant.complete(
                caches.kept if caches is not None else (),
                begun_ns=caches.begun_ns if caches is not None else 0,
                preloads=job.preload and keeps,
            )
        if job.is_standby:
            hand_over()
            # Of the host, which is seen from within a container's mounts.
            execute(["true"])
        place.become(command)
    except BaseException:
        attendant.abandon()
        if place is None or not place.is_entered:
            checkpoints.abandon()
            if place is not None:
                place.close()
        raise


def _restore_caches(
    settings: Settings, job: Job, place: Place, timeline: Timeline, say: Say
) -> "KeptCaches | None":
    """Put the kept caches in place, and set their variables; None where none is wanted, or none can
    be. Never raises."""
    if not job.kept and not settings.keep_caches:
        return None
    cache_job = place.cache_job(job.command)
    if cache_job is None:
        return None
    from bootseer.launch.caches.finding import Wish
    from bootseer.launch.caches.run import KeptCaches

    caches = KeptCaches(settings, Wish(job.kept, settings.keep_caches), say)
    os.environ.update(caches.restore(timeline, cache_job, place.show))
    return caches


def _preload(
    settings: Settings, job: Job, place: Place, timeline: Timeline, say: Say
) -> tuple[str, ...]:
    """Import beside what is left of the start, since the environment and all variables are there;
    return the command, which may be the preloader's."""
    from bootseer.launch.preloading import begin

    try:
        if place.is_image or not (settings.trace_python and timeline.is_written):
            raise InvalidInputError("it needs the recording of imports, and no --image")
        added, command = begin(settings, job)
    except (BootseerError, OSError) as error:
        say(f"warning: workers start without a preloader: {error}")
        return job.command
    os.environ.update(added)
    return command


def _may_have_members(settings: Settings) -> bool:
    """Return whether anything may tell the nodes of this start; a start without loads no code for
    a fan-out."""
    if not settings.fanout:
        return False
    schedulers = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "KUBERNETES_SERVICE_HOST")
    told = any(name in os.environ for name in schedulers)
    return told or settings.fanout_hosts != "auto" or any(n.startswith("VC_") for n in os.environ)


def _environment(settings: Settings, timeline: Timeline, start: Span) -> dict[str, str]:
    return {
        **({FILE_VARIABLE: str(timeline.path)} if timeline.is_written else {}),
        "TRACEPARENT": start.traceparent,
        "BOOTSEER_JOB": settings.job,
        **({"BOOTSEER_SUBMISSION": settings.submission} if settings.submission else {}),
        "BOOTSEER_ATTEMPT": str(settings.attempt),
        "BOOTSEER_NODE": settings.node,
        "BOOTSEER_RANK": str(settings.rank),
    }
