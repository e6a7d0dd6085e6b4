"""Where a start's command runs: on the host, or in a container of an image.

Both have one face, so that the start does not ask which it is; alone knows what differs. Where the
image cannot be mounted, it is extracted. Where it comes from is decided by `prefetch.images`. Main
thread only.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from msgspec.structs import replace

from bootseer.errors import BootseerError, InvalidInputError, NotFoundError
from bootseer.launch.job import Job
from bootseer.launch.signals import hand_over
from bootseer.linux.scripts import execute
from bootseer.profile.collect import PACKAGE, watched
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import FILE_VARIABLE, Timeline

if TYPE_CHECKING:
    from bootseer.launch.caches.finding import Job as CacheJob
    from bootseer.prefetch.container.container import Container
    from bootseer.snapshots.key import Request
    from bootseer.snapshots.layers import Layers

Say = Callable[[str], None]
"""Gets one sentence for people at a time."""

_log = logging.getLogger(__name__)

# In the container. Not where it is on the host: a user other than root may not get there.
_TIMELINE = "/run/bootseer/timeline.jsonl"
_PACKAGE_INSIDE = Path("/run/bootseer/python/bootseer")
"""Our sources in the container, for the Python processes that are watched there."""


class Place(Protocol):
    """Where a start's command runs."""

    @property
    def is_image(self) -> bool:
        """Whether its root is made anew by each start."""

    @property
    def is_entered(self) -> bool:
        """Whether this process sees copies of the host's mounts only: all that it has there goes
        when it does."""

    def bind(self, source: Path, target: str) -> None:
        """Show what is mounted aside where the job wants it. Before `enter`. Raises:
        BootseerError."""

    def request(self, request: "Request") -> "Request":
        """Return a set-up as it runs here, which this process enters. Raises: BootseerError."""

    def enter(self) -> None:
        """Be where the command runs. Idempotent. Raises: BootseerError."""

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        """Return the command as those see it who look for its caches; None where it has none,
        unless the job names some."""

    def show(self, folder: Path, path: str) -> None:
        """Let the entered place see a folder of the host as its `path`; its user writes there.
        Raises: OSError."""

    def become(self, command: tuple[str, ...]) -> NoReturn:
        """Become the command. Raises: SetupFailedError with 126 or 127."""

    def close(self) -> None:
        """Take it down, where it was not entered."""


class HostPlace:
    """The node itself, as this process sees it."""

    is_image = False
    is_entered = False

    def __init__(self, job: Job, *, watches: bool) -> None:
        self._job = job
        self._watches = watches

    def bind(self, source: Path, target: str) -> None:
        """Nothing: what is mounted is where the job wants it."""

    def request(self, request: "Request") -> "Request":
        """Return it as it is."""
        return request

    def enter(self) -> None:
        """Nothing: this process is there."""

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        """See `Place`."""
        from bootseer.launch.caches.packages import may_have_caches

        if not self._job.kept and not may_have_caches(command, os.environ):
            return None
        from bootseer.launch.caches.finding import Job as CacheJob

        return CacheJob(command, os.environ)

    def show(self, folder: Path, path: str) -> None:
        """Nothing: the folder is where it is."""

    def become(self, command: tuple[str, ...]) -> NoReturn:
        """See `Place`."""
        hand_over()
        if self._watches:
            os.environ.update(watched(os.environ))
        execute(command)

    def close(self) -> None:
        """Nothing."""


class ImagePlace:
    """A container of an image."""

    is_image = True

    def __init__(self, job: Job, container: "Container", *, watches: bool) -> None:
        self._job = job
        self._container = container
        self._watches = watches

    @property
    def is_entered(self) -> bool:
        """See `Place`."""
        return self._container.has_namespace

    def bind(self, source: Path, target: str) -> None:
        """See `Place`."""
        self._container.bind(source, target)

    def request(self, request: "Request") -> "Request":
        """See `Place`."""
        container = self._container
        container.enter()
        return replace(
            request,
            # Not the index, which is another one once the image is published.
            base=container.image.record.identity,
            root=container.root,
            scratch=container.scratch / "setups",
            layers=_layers(container),
            directory=container.config.working_dir or "/",
            environ=self._environment(),
            runner=container.run,
        )

    def enter(self) -> None:
        """See `Place`."""
        self._container.enter()

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        """See `Place`."""
        from bootseer.launch.caches.finding import Job as CacheJob
        from bootseer.prefetch.container.process import arguments_of

        container = self._container
        return CacheJob(
            command or arguments_of(container.config, (), self._job.entrypoint),
            self._environment(),
            root=container.root,
            directory=container.config.working_dir or "/",
            base=container.image.record.identity,
            runner=container.run,
            binds=tuple((bind.target, bind.source) for bind in container.binds),
        )

    def show(self, folder: Path, path: str) -> None:
        """See `Place`."""
        from bootseer.linux.namespaces import MS_BIND, mount
        from bootseer.linux.root_paths import resolve_in_root

        container = self._container
        user = container.job_user()
        if user.uid and not container.rootless:
            os.chown(folder, user.uid, user.gid, follow_symlinks=False)
        place: Path = resolve_in_root(container.root, path)
        place.mkdir(parents=True, exist_ok=True)
        mount(folder, place, flags=MS_BIND)

    def become(self, command: tuple[str, ...]) -> NoReturn:
        """See `Place`."""
        environment: Mapping[str, str] = self._environment()
        if self._watches:
            environment = watched(environment, _PACKAGE_INSIDE)
        hand_over()
        self._container.exec(command, environment, entrypoint=self._job.entrypoint)

    def close(self) -> None:
        """See `Place`."""
        self._container.close()

    def _environment(self) -> dict[str, str]:
        """This process's variables for a program of the container."""
        environment = self._container.job_environment(os.environ)
        if any(bind.target == _TIMELINE for bind in self._container.binds):
            environment[FILE_VARIABLE] = _TIMELINE
        else:
            environment.pop(FILE_VARIABLE, None)
        return environment


def open_place(settings: Settings, job: Job, timeline: Timeline, say: Say) -> Place:
    """Return where `job` runs: on the host, or in a container of its image, which is mounted when
    this returns.

    The image is a name in the store, or a source, of which what the store lacks is pulled; it is
    published in the background, if the settings say so.
    Raises: BootseerError where the image cannot be had at all, or the runtime cannot be used.
    """
    watches = settings.trace_python and timeline.is_written
    if not job.image:
        return HostPlace(job, watches=watches)
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
        from bootseer.prefetch.images.find import resolve_image

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
            if watches:
                container.bind(PACKAGE, str(_PACKAGE_INSIDE), read_only=True)
        return ImagePlace(job, container, watches=watches)


def _layers(container: "Container") -> "Layers":
    """Return the layers of the root of a container that was entered."""
    from bootseer.prefetch.cache.indexes import read_kept_tree
    from bootseer.prefetch.images.mount import MountedImage
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
