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
from bootseer.base.patience import PATIENCE
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.launch.attendant import Attendant
from bootseer.launch.checkpoints import CheckpointMounts
from bootseer.launch.job import Job, setup_command
from bootseer.launch.setups import set_up
from bootseer.launch.signals import StoppedError, StopSignals, end_by, hand_over
from bootseer.launch.submission import choose_submission
from bootseer.linux.scripts import execute
from bootseer.profile.collect import watched
from bootseer.settings.config import FANOUT_KEY, Settings, is_default_store
from bootseer.timeline.otlp import START
from bootseer.timeline.recorder import FILE_VARIABLE, Span, Timeline

if TYPE_CHECKING:
    from bootseer.launch.caches.run import KeptCaches
    from bootseer.prefetch.container.container import Container

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
            PATIENCE.limit(settings.deadline_s)
            _Start(settings, job, setups, say).run()
    except StoppedError as stopped:
        say(f"the start was {stopped}")
        end_by(stopped.number)


class _Start:
    def __init__(self, settings: Settings, job: Job, setups: list[list[str]], say: Say) -> None:
        self._settings = settings
        self._job = job
        self._setups = setups
        self._say = say
        self._checkpoints = CheckpointMounts(settings, job.checkpoints, say, aside=bool(job.image))
        self._container: Container | None = None
        self._is_watched = False
        self._caches: KeptCaches | None = None
        self._attendant = Attendant(settings, say)
        self._command = job.command

    def run(self) -> NoReturn:
        settings = self._settings
        # The command does not get it.
        secret = os.environ.pop(FANOUT_KEY, "")
        if not settings.submission:
            chosen = choose_submission(settings, self._job.command)
            settings = self._settings = replace(settings, submission=chosen)
        timeline = Timeline.start(
            settings.timeline_dir,
            job=settings.job,
            submission=settings.submission,
            attempt=settings.attempt,
            node=settings.node,
            rank=settings.rank,
        )
        self._is_watched = settings.trace_python and timeline.is_written
        self._attendant = Attendant(settings, self._say)
        self._attendant.begin(timeline, keeps=self._may_keep())
        try:
            with timeline.span(START, since_ns=loaded_ns) as start:
                # Servers started on the way, the set-ups and the command write to it, too.
                os.environ.update(_environment(settings, timeline, start))
                has_fanout = False
                if _may_have_members(settings):
                    from bootseer.launch.fanout import begin_fanout

                    has_fanout = begin_fanout(settings, self._job.command, secret, self._say)
                # From here on: whether there is one to be asked.
                self._settings = replace(settings, fanout=has_fanout)
                self._stages(timeline.below(start))
            self._become()
        except BaseException:
            self._abandon()
            raise

    def _stages(self, timeline: Timeline) -> None:
        self._checkpoints.start()
        if self._job.image:
            from bootseer.launch.image import open_image

            self._container = open_image(self._settings, self._job, timeline, self._say)
            # Once it is entered, no mount of the host comes in any more.
            for source, target in self._checkpoints.finish():
                self._container.bind(source, target)
        for number, command in enumerate(self._setups):
            # A set-up may take long, and be for nothing.
            self._checkpoints.check()
            name = "environment" if len(self._setups) == 1 else f"environment {number + 1}"
            with timeline.span(name) as span:
                set_up(
                    self._settings,
                    self._job,
                    command,
                    self._container,
                    timeline.below(span),
                    span,
                    self._say,
                    # In the namespace that is left nothing more is mounted for this job.
                    before_own_view=self._finish_checkpoints,
                )
        if self._container is not None:
            self._container.enter()
        # Behind the environments, which say what versions there are.
        self._restore_caches(timeline)
        if self._job.preload:
            self._begin_preloader()
        self._checkpoints.finish()
        self._complete()

    def _kept_caches(self) -> "KeptCaches | None":
        """None where none is wanted, or none can be."""
        if self._caches is None and (self._job.kept or self._settings.keep_caches):
            if not self._job.kept and self._container is None:
                from bootseer.launch.caches.packages import may_have_caches

                if not may_have_caches(self._job.command, os.environ):
                    return None
            from bootseer.launch.caches.finding import Wish
            from bootseer.launch.caches.run import KeptCaches

            wish = Wish(self._job.kept, self._settings.keep_caches)
            self._caches = KeptCaches(self._settings, wish, self._say)
        return self._caches

    def _restore_caches(self, timeline: Timeline) -> None:
        caches = self._kept_caches()
        if caches is None:
            return
        from bootseer.launch.caches.finding import Job as CacheJob

        job = CacheJob(self._job.command, os.environ)
        if self._container is not None:
            from bootseer.launch.image import container_environment
            from bootseer.prefetch.container.process import arguments_of

            container = self._container
            command = self._job.command
            job = CacheJob(
                command or arguments_of(container.config, (), self._job.entrypoint),
                container_environment(container),
                root=container.root,
                directory=container.config.working_dir or "/",
                base=container.image.record.identity,
                runner=container.run,
                binds=tuple((bind.target, bind.source) for bind in container.binds),
            )
        variables = caches.restore(timeline, job, self._container)
        os.environ.update(variables)

    def _may_keep(self) -> bool:
        """Return whether there may be caches that other nodes, or other starts, use."""
        return bool(self._job.kept) or (
            self._settings.keep_caches and not is_default_store(self._settings)
        )

    def _complete(self) -> None:
        """Hand over to the attendant what is to be done for the job."""
        caches = self._caches
        self._attendant.complete(
            caches.kept if caches is not None else (),
            begun_ns=caches.begun_ns if caches is not None else 0,
            preloads=self._job.preload and self._may_keep(),
        )

    def _begin_preloader(self) -> None:
        """Import beside what is left of the start: the environment and all variables are there."""
        from bootseer.launch.preloading import begin

        try:
            if self._container is not None or not self._is_watched:
                raise InvalidInputError("it needs the recording of imports, and no --image")
            added, command = begin(self._settings, self._job)
        except (BootseerError, OSError) as error:
            self._say(f"warning: workers start without a preloader: {error}")
            return
        os.environ.update(added)
        self._command = command

    def _finish_checkpoints(self) -> None:
        self._checkpoints.finish()

    def _become(self) -> NoReturn:
        command = self._job.command
        if self._job.is_standby:
            hand_over()
            # Of the host, which is seen from within a container's mounts.
            execute(["true"])
        if self._container is not None:
            from bootseer.launch.image import PACKAGE_INSIDE, container_environment

            environment = container_environment(self._container)
            if self._is_watched:
                environment = watched(environment, PACKAGE_INSIDE)
            hand_over()
            self._container.exec(command, environment, entrypoint=self._job.entrypoint)
        hand_over()
        if self._is_watched:
            os.environ.update(watched(os.environ))
        execute(self._command)

    def _abandon(self) -> None:
        """Take down what was begun: the start has failed."""
        self._attendant.abandon()
        if self._container is not None and self._container.entered:
            # We see copies of the host's mounts only. All goes when this process does.
            return
        self._checkpoints.abandon()
        if self._container is not None:
            self._container.close()


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
