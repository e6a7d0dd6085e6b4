"""Sequence of a start: image, environment and checkpoint stages, then `exec` of the command.

This module alone decides which stages overlap and what happens when one fails. Checkpoints are
mounted, and warm up, while the image and then the environments are prepared; an environment follows
the image because it may be set up inside the image. `exec` replaces this process, so that signals,
the exit code and the behaviour as PID 1 are the command's own. Servers that a stage has started
watch this process id, which becomes the command's.

Main thread only: it forks and handles signals.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from bootseer import loaded_ns
from bootseer.base.wait_budget import WAIT_BUDGET, first_answer_s
from bootseer.launch.attendant import Attendant
from bootseer.launch.checkpoints import CheckpointMounts
from bootseer.launch.job import Job, Say, setup_command
from bootseer.launch.place import Place, open_place
from bootseer.launch.signals import StartStoppedError, StopSignals, end_by, hand_over
from bootseer.launch.submission import choose_submission
from bootseer.linux.scripts import execute
from bootseer.served.ready_socket import add_ready_names
from bootseer.settings.config import FANOUT_KEY, Settings, is_default_store
from bootseer.timeline.otlp import LIVE, START, WAITED_FOR
from bootseer.timeline.recorder import FILE_VARIABLE, Span, Timeline

if TYPE_CHECKING:
    import subprocess

    from bootseer.launch.caches.run import KeptCache
    from bootseer.launch.preloading import Preloading


def launch(settings: Settings, job: Job, say: Say) -> NoReturn:
    """Start `job` and become its command; return only by an exception.

    A stop signal before `exec` ends everything that was begun, then this process.

    Raises: SetupFailedError with the exit code of a failed set-up, or with 126 or 127 if the
    command cannot be started; BootseerError if the image or a checkpoint cannot be had at all.
    """
    # Before anything is begun, so that a set-up line that cannot be parsed fails at once.
    setups = [setup_command(line) for line in job.setups]
    try:
        with StopSignals():
            # A store that is away, or falls silent, costs the whole start one wait, not one for
            # each stage.
            deadline_s = settings.deadline_s
            WAIT_BUDGET.limit(deadline_s, first_answer_s=first_answer_s(deadline_s))
            _start(settings, job, setups, say)
    except StartStoppedError as stopped:
        say(f"the start was {stopped}")
        end_by(stopped.number)


def _start(settings: Settings, job: Job, setups: list[list[str]], say: Say) -> NoReturn:
    # The secret is for the launcher: the command's environment must not have it.
    secret = os.environ.pop(FANOUT_KEY, "")
    if not settings.submission:
        settings = replace(settings, submission=choose_submission(settings, job.command, say))
    timeline = Timeline.start(
        settings.timeline_dir,
        job=settings.job,
        submission=settings.submission,
        attempt=settings.attempt,
        node=settings.node,
        rank=settings.rank,
    )
    keeps_caches = bool(job.kept) or (settings.keep_caches and not is_default_store(settings))
    preloading = _preloading(settings, job, say, publishes=keeps_caches) if job.preload else None
    attendant = Attendant(settings, say)
    checkpoints: CheckpointMounts | None = None
    place: Place | None = None
    attendant.begin(timeline, is_needed=keeps_caches or job.preload)
    try:
        with timeline.span(START, since_ns=loaded_ns) as start:
            # Servers, set-ups and the command write to the timeline, too.
            os.environ.update(_environment(settings, timeline, start))
            has_fanout = False
            if _may_have_members(settings):
                from bootseer.launch.fanout import begin_fanout

                has_fanout = begin_fanout(settings, job.command, secret, say)
            # From here on the setting says whether a fan-out runs, not whether one is allowed.
            settings = replace(settings, fanout=has_fanout)
            stages = timeline.below(start)
            checkpoints = CheckpointMounts(settings, job.checkpoints, say, aside=bool(job.image))
            checkpoints.start()
            place = open_place(settings, job, stages, say)
            if preloading is not None:
                preloading.show(place, records=settings.trace_python and timeline.is_written)
            if place.is_image:
                # After the container is entered, new mounts of the host do not appear in it.
                for source, target in checkpoints.finish():
                    place.bind(source, target)
            for number, line in enumerate(setups):
                # A set-up may take long: fail first if a checkpoint mount has failed.
                checkpoints.check()
                name = "environment" if len(setups) == 1 else f"environment {number + 1}"
                with stages.span(name) as span:
                    # Once the set-up enters a mount namespace of its own, mounts made outside it
                    # do not reach the job.
                    job_start = _SetupStart(stages.below(span), checkpoints.finish)
                    _set_up(settings, job, line, place, span, say, job_start)
            place.enter()
            # After the environments: installed versions are part of a cache's key.
            caches, begun_ns = _restore_caches(settings, job, place, stages, say)
            arguments = place.arguments(job.command)
            if preloading is not None:
                arguments = preloading.begin(place, arguments)
            checkpoints.finish()
            preloads = preloading.handoff() if preloading is not None else None
            attendant.complete(caches, begun_ns=begun_ns, preloads=preloads)
        if job.is_standby:
            hand_over()
            # A program of the host: also in a container, this process still sees the host's root.
            execute(["true"])
        place.become(arguments)
    except BaseException:
        attendant.abandon()
        if place is None or not place.is_entered:
            if checkpoints is not None:
                checkpoints.abandon()
            if place is not None:
                place.close()
        raise


def _set_up(
    settings: Settings,
    job: Job,
    command: list[str],
    place: Place,
    span: Span,
    say: Say,
    job_start: "_SetupStart",
) -> None:
    """Restore the snapshot of one set-up, or run it. Raises: as `environment.run_setup`."""
    from bootseer.snapshots.environment import run_setup
    from bootseer.snapshots.key import SetupRequest, run_plainly

    request = place.request(
        SetupRequest(
            command=command,
            targets=job.targets,
            inputs=job.inputs,
            variables=job.variables,
            runner=run_plainly,
        )
    )
    request = replace(request, runner=_without_stdin(request.runner))
    result = run_setup(settings, request, report=say, forks=True, job_start=job_start)
    if result.how != "in place":
        # The set-up may have changed what a launcher, such as pyenv's, starts.
        place.answers.clear()
    add_ready_names(os.environ, *result.ready_names)
    if result.mode:
        span.set("bootseer.mode", result.mode)
    span.set("bootseer.hit", result.hit)
    span.set("bootseer.bytes", result.moved_bytes)
    # The root of an image is new at each start; a tree that the node has kept is only linked in.
    is_live = result.mode and (result.how == "in place" or (place.is_image and result.was_here))
    changed = "changed: " if result.is_changed else ""
    span.set("bootseer.how", LIVE if is_live else changed + result.how)


class _SetupStart:
    """Callbacks of a set-up into the start; see `snapshots.environment.JobStart`."""

    def __init__(self, timeline: Timeline, before_own_view: Callable[[], object]) -> None:
        self._timeline = timeline
        self._before_own_view = before_own_view

    def before_own_view(self) -> None:
        self._before_own_view()

    def waiting_for(self, node: str, created_ns: int) -> Callable[[], object]:
        if 0 < created_ns < loaded_ns:
            return lambda: None  # the snapshot is older than this start
        return self._timeline.span("wait for set-up", {WAITED_FOR: node}).end


def _without_stdin(
    runner: "Callable[..., subprocess.CompletedProcess[bytes]]",
) -> "Callable[..., subprocess.CompletedProcess[bytes]]":
    """Return the runner with an empty standard input, since this process's belongs to the job."""

    def run(args: Any, /, *, stdin: int | None = None, **options: Any) -> Any:
        import subprocess  # here: a start that finds its environment in place runs nothing

        return runner(args, stdin=subprocess.DEVNULL if stdin is None else stdin, **options)

    return run


def _restore_caches(
    settings: Settings, job: Job, place: Place, timeline: Timeline, say: Say
) -> "tuple[Sequence[KeptCache], int]":
    """Put the kept caches in place and set their variables. Never raises.

    Return the caches to publish after the start, and when the search for them began.
    """
    if not job.kept and not settings.keep_caches:
        return (), 0
    cache_job = place.cache_job(job.command)
    if cache_job is None:
        return (), 0
    from bootseer.launch.caches.finding import KeepRequest
    from bootseer.launch.caches.run import restore_caches

    request = KeepRequest(job.kept, settings.keep_caches)
    found = restore_caches(settings, request, cache_job, timeline, say, place.show)
    os.environ.update(found.variables)
    return found.kept, found.begun_ns


def _preloading(settings: Settings, job: Job, say: Say, *, publishes: bool) -> "Preloading":
    # Imported here, since most starts do not preload.
    from bootseer.launch.preloading import Preloading

    return Preloading(settings, job, say, publishes=publishes)


def _may_have_members(settings: Settings) -> bool:
    """Return whether anything may list the start's nodes; if not, fan-out is not loaded."""
    if not settings.fanout:
        return False
    schedulers = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "KUBERNETES_SERVICE_HOST")
    is_scheduled = any(name in os.environ for name in schedulers)
    return (
        is_scheduled
        or settings.fanout_hosts != "auto"
        or any(n.startswith("VC_") for n in os.environ)
    )


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
