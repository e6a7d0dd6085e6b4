"""The image stage of a start: from what `--image` says to a container that can be entered.

Alone decides what is tried where the image cannot be mounted: it is extracted. Where it comes from
is decided by `prefetch.resolve`. Main thread only.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, InvalidInputError, NotFoundError
from bootseer.launch.job import Job
from bootseer.profile.collect import PACKAGE
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import FILE_VARIABLE, Timeline

if TYPE_CHECKING:
    from bootseer.prefetch.container.container import Container
    from bootseer.snapshots.layers import Layers

Say = Callable[[str], None]
"""Gets one sentence for people at a time."""

_log = logging.getLogger(__name__)

# In the container. Not where it is on the host: a user other than root may not get there.
_TIMELINE = "/run/bootseer/timeline.jsonl"
PACKAGE_INSIDE = Path("/run/bootseer/python/bootseer")
"""Our sources in the container, for the Python processes that are watched there."""


def open_image(settings: Settings, job: Job, timeline: Timeline, say: Say) -> "Container":
    """A container of the image of `job`: a name in the store, or a source, of which what the store
    lacks is pulled. It is published in the background, if the settings say so.

    Raises: BootseerError where the image cannot be had at all, or the runtime cannot be used.
    """
    if job.runtime == "runc":
        from bootseer.prefetch.container.runc import check_runc

        check_runc()
    from bootseer.served.cover_users import lingering
    from bootseer.served.folders import RUN
    from bootseer.served.processes import TREE, start

    with timeline.span("image") as span, contextlib.ExitStack() as stack:
        process = None
        # Its code loads while ours does. Without one, mounting says why. What lingers has one.
        with contextlib.suppress(BootseerError):
            if not any(lingering(settings.run_dir, RUN)):
                process = stack.enter_context(start(TREE, settings.run_dir, copy=True))
        from bootseer.prefetch.container.container import prepare_container
        from bootseer.prefetch.container.extracted import prepare_extracted
        from bootseer.prefetch.container.process import arguments_of
        from bootseer.prefetch.resolve.resolve import resolve_image

        resolved = resolve_image(settings, job.image, say=say, timeline=timeline.below(span))
        try:
            # Before anything is mounted: what can be known of the command is known now.
            arguments_of(resolved.record.config, job.command, job.entrypoint)
            container = prepare_container(
                *(settings, resolved),
                binds=job.binds,
                process=process,
                user=job.user,
                runtime=job.runtime,
            )
            span.set("bootseer.how", container.how)
            span.set("bootseer.from", "store" if resolved.is_published else "node")
        except (InvalidInputError, NotFoundError):
            raise
        except (BootseerError, OSError) as error:
            say(f"warning: starting from an extracted image, since none can be mounted: {error}")
            span.set("bootseer.fallback", "extracted")
            container = prepare_extracted(
                settings, resolved, binds=job.binds, user=job.user, runtime=job.runtime
            )
        if timeline.is_written:
            _show_timeline(container, timeline.path)
            if settings.trace_python:
                container.bind(PACKAGE, str(PACKAGE_INSIDE), read_only=True)
        return container


def container_environment(container: "Container") -> dict[str, str]:
    """This process's variables for a program of the container."""
    environment = container.job_environment(os.environ)
    if any(bind.target == _TIMELINE for bind in container.binds):
        environment[FILE_VARIABLE] = _TIMELINE
    else:
        environment.pop(FILE_VARIABLE, None)
    return environment


def container_layers(container: "Container") -> "Layers":
    """Returns the layers of the root of a container that was entered."""
    from bootseer.prefetch.cache.kept_indexes import read_kept_tree
    from bootseer.prefetch.resolve.mount import MountedImage
    from bootseer.snapshots.layers import Layers

    image = container.image
    tree = None
    if isinstance(image, MountedImage):
        settings, digest = image.settings, image.state.index_digest
        # Once for all targets of a set-up: it takes as long as a scan of thousands of names.
        tree = functools.cache(
            functools.partial(read_kept_tree, settings.cache_dir, digest, run_dir=settings.run_dir)
        )
    return Layers(container.root, container.scratch / "upper", image.directory, tree)


def _show_timeline(container: "Container", path: Path) -> None:
    """Let training code in the container write to the timeline, whichever user it runs as."""
    container.bind(path, _TIMELINE)
    user = container.job_user()
    if user.uid and not container.rootless:
        try:
            os.chown(path, user.uid, -1, follow_symlinks=False)
        except OSError as error:
            _log.debug("stages of the job itself will not be on the timeline: %s", error)
