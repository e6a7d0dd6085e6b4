"""One start of a job: image, environment and checkpoint stages, then `exec` of the command.

Alone decides what overlaps and what happens when a part fails. The image and the environments
follow each other, since an environment may be set up inside the image; the checkpoints are
mounted, and begin to warm up, meanwhile. `exec` replaces this process, so signals, the exit code
and PID 1 behaviour are the command's own. Servers that a stage started watch this process id,
which is then the command's.
"""

import errno
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from bootseer.config import Settings
from bootseer.errors import (
    InvalidInputError,
    NotFoundError,
    SetupFailedError,
    UnavailableError,
)
from bootseer.launch_checkpoints import CheckpointMounts, CheckpointPath
from bootseer.report.breakdown import START
from bootseer.timeline.recorder import FILE_VARIABLE, Span, Timeline

if TYPE_CHECKING:
    from bootseer.prefetch.container import Container

# What makes a set-up line a script for the shell rather than a plain command.
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?\[\]#~=%!{}\n]")
Say = Callable[[str], None]
"""Gets one sentence for people at a time."""


@dataclass(frozen=True, slots=True)
class Job:
    """What `bootseer run` was asked for."""

    command: tuple[str, ...]
    image: str = ""
    setups: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    checkpoints: tuple[CheckpointPath, ...] = ()
    binds: tuple[str, ...] = ()
    """`SOURCE:DIRECTORY[:ro]`, as docker has them."""


def setup_command(line: str) -> list[str]:
    """The words of a set-up line; `sh -c LINE` where it needs a shell. Pure.

    Raises: InvalidInputError.
    """
    if _SHELL_SYNTAX.search(line):
        return ["sh", "-c", line]
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidInputError(f"the set-up {line!r} cannot be read: {error}") from None
    if not words:
        raise InvalidInputError("a set-up line is empty")
    return words


def launch(settings: Settings, job: Job, say: Say) -> NoReturn:
    """Start `job` and become it: this returns only by an exception.

    Raises: SetupFailedError with the exit code of a set-up that failed; BootseerError where the
    image or a checkpoint cannot be had at all, or the command cannot be started.
    """
    timeline = Timeline.start(
        settings.timeline_dir,
        job=settings.job,
        attempt=settings.attempt,
        node=settings.node,
        rank=settings.rank,
    )
    checkpoints = CheckpointMounts(settings, job.checkpoints, aside=bool(job.image))
    container: Container | None = None
    with timeline.span(START) as start:
        # Servers started on the way, the set-ups and the command write to this timeline, too.
        os.environ.update(_environment(settings, timeline, start))
        stages = timeline.below(start)
        checkpoints.start(stages)
        try:
            if job.image:
                container = _open_image(settings, job, stages, say)
            for source, target in checkpoints.finish():
                if container is not None:
                    container.bind(source, target)
            for number, line in enumerate(job.setups):
                name = "environment" if len(job.setups) == 1 else f"environment {number + 1}"
                with stages.span(name) as span:
                    _set_up(settings, job, line, container, span, say)
            if container is not None:
                container.enter()
        except BaseException:
            checkpoints.abandon()
            if container is not None:
                container.close()
            raise
    _become(job.command, container)


def _environment(settings: Settings, timeline: Timeline, start: Span) -> dict[str, str]:
    return {
        FILE_VARIABLE: str(timeline.path),
        "TRACEPARENT": start.traceparent,
        "BOOTSEER_JOB": settings.job,
        "BOOTSEER_ATTEMPT": str(settings.attempt),
        "BOOTSEER_NODE": settings.node,
        "BOOTSEER_RANK": str(settings.rank),
    }


# ---- image -----------------------------------------------------------------------------------


def _open_image(settings: Settings, job: Job, timeline: Timeline, say: Say) -> "Container":
    from bootseer.prefetch.container import prepare_container

    with timeline.span("image") as span:
        settings, reference = _ensure_indexed(settings, job.image, timeline.below(span), say)
        # So that training code in the container finds the timeline under the same name.
        timeline_bind = f"{settings.timeline_dir}:{settings.timeline_dir}"
        container = prepare_container(settings, reference, binds=[*job.binds, timeline_bind])
        span.set("bootseer.from", "store")
        return container


def _ensure_indexed(
    settings: Settings, image: str, timeline: Timeline, say: Say
) -> tuple[Settings, str]:
    """The settings with a store that has the image, and the name that it has there.

    An image that nobody has indexed is pulled whole, as any start would, and indexed meanwhile.
    """
    from bootseer.prefetch.catalogue import find_image
    from bootseer.prefetch.sources import is_source
    from bootseer.store import open_store

    try:
        if is_source(image):
            return settings, _index_source(settings, image, timeline, say)
        with open_store(settings.store_url, deadline_s=settings.deadline_s) as store:
            return settings, find_image(store, image).reference
    except UnavailableError as error:
        if not is_source(image):
            raise
        # The ordinary path without the shared store: pull the image for this node alone.
        say(f"warning: starting without the shared store: {error}")
        settings = replace(settings, store_url=(settings.cache_dir / "local-store").as_uri())
        return settings, _index_source(settings, image, timeline, say)


def _index_source(settings: Settings, image: str, timeline: Timeline, say: Say) -> str:
    """The name of the image in the store, where it is now if it was not before."""
    from bootseer.prefetch.catalogue import find_image
    from bootseer.prefetch.indexing import index_image
    from bootseer.prefetch.sources import open_source
    from bootseer.store import open_store

    work_dir = settings.cache_dir / "work"
    with (
        open_source(image, work_dir) as source,
        open_store(settings.store_url, deadline_s=settings.deadline_s) as store,
    ):
        try:
            known = find_image(store, source.reference)
            # A tag moves; the digest of the configuration is the image. A directory has none.
            if source.identity in (None, known.identity):
                return known.reference
        except (NotFoundError, InvalidInputError):
            pass
        with timeline.span("image index") as span:
            say(f"image {source.reference} is not indexed yet: pulling it whole, this once")
            record = index_image(source, store, work_dir)
            span.set("bootseer.bytes", sum(layer.size_bytes or 0 for layer in source.layers))
            span.set("bootseer.from", "source")
        return record.reference


# ---- environment -----------------------------------------------------------------------------


def _set_up(
    settings: Settings,
    job: Job,
    line: str,
    container: "Container | None",
    span: Span,
    say: Say,
) -> None:
    from bootseer.snapshots.request import Request
    from bootseer.snapshots.run import run_setup

    request = Request(
        command=setup_command(line),
        targets=job.targets,
        inputs=job.inputs,
        variables=job.variables,
    )
    if container is not None:
        container.enter()
        request = replace(
            request,
            base=container.image.record.index_digest,
            root=container.root,
            directory=container.config.working_dir or "/",
            environ=container.job_environment(os.environ),
            runner=container.run,
        )
    result = run_setup(settings, request, report=say)
    span.set("bootseer.hit", result.hit)
    span.set("bootseer.bytes", result.moved_bytes)
    span.set("bootseer.how", result.how)


# ---- the command -----------------------------------------------------------------------------


def _become(command: tuple[str, ...], container: "Container | None") -> NoReturn:
    if container is not None:
        container.exec(command, container.job_environment(os.environ))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # 127 and 126, as shells have it.
        code = 127 if error.errno == errno.ENOENT else 126
        raise SetupFailedError(f"cannot run {command[0]}: {error.strerror}", code) from error
