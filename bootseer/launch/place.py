"""Place where a start's command runs: the host, or a container of an image.

`HostPlace` and `ImagePlace` have the same methods, so that the start need not ask which of them it
has; only this module knows the difference. If the image cannot be mounted, it is extracted.
`prefetch.images` decides where the image comes from. Main thread only.
"""

import contextlib
import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from msgspec.structs import replace

from bootseer.errors import BootseerError, InvalidInputError, NotFoundError
from bootseer.launch.job import Job, Say
from bootseer.launch.signals import hand_over
from bootseer.linux.scripts import execute
from bootseer.profile.collect import PACKAGE, recording_environment
from bootseer.settings.config import Settings
from bootseer.timeline.recorder import FILE_VARIABLE, Timeline

if TYPE_CHECKING:
    from bootseer.launch.caches.finding import CacheJob
    from bootseer.prefetch.container.container import Container
    from bootseer.snapshots.key import SetupRequest
    from bootseer.snapshots.layers import Layers
    from bootseer.snapshots.python import Answers

_log = logging.getLogger(__name__)

# Path in the container: its user may be unable to reach the timeline's path on the host.
_TIMELINE = "/run/bootseer/timeline.jsonl"
_PACKAGE_INSIDE = Path("/run/bootseer/python/bootseer")
"""Folder in the container with our sources, for the Python processes whose imports are recorded."""
_FOLDERS_INSIDE = "/run/bootseer"


class Place(Protocol):
    """Interface of the place where a start's command runs."""

    answers: "Answers"
    """Answers of the interpreters that were asked since the start last changed anything."""

    @property
    def is_image(self) -> bool:
        """Whether the command's root directory is made anew by each start."""

    @property
    def is_entered(self) -> bool:
        """Whether this process is in a mount namespace of its own, whose mounts end with it."""

    def bind(self, source: Path, target: str) -> None:
        """Show the mount `source` to the job as `target`, before `enter`. Raises: BootseerError."""

    def show_folder(self, folder: Path, name: str) -> str:
        """Show a folder of ours to the job, which may write to it, before `enter`.

        Return its path for the job, at which a container calls it `name`. Raises: BootseerError.
        """

    def request(self, request: "SetupRequest") -> "SetupRequest":
        """Return the set-up `request` for this place; may enter it. Raises: BootseerError."""

    def enter(self) -> None:
        """Move this process to where the command runs. Idempotent. Raises: BootseerError."""

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        """Return the command as the search for kept caches sees it; None if it has no caches."""

    def show(self, folder: Path, path: str) -> None:
        """Show a folder of the host to the job as `path`, after `enter`. Raises: OSError."""

    def arguments(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return all words of the command: a container's entrypoint comes first."""

    def environment(self) -> dict[str, str]:
        """Return the variables of the command. Raises: BootseerError."""

    def enter_copy(self) -> None:
        """Move a copy of this process to root, folder and user of the command, after `enter`.

        Raises: BootseerError, OSError.
        """

    def become(self, arguments: tuple[str, ...]) -> NoReturn:
        """Replace this process by the command. Raises: SetupFailedError with 126 or 127."""

    def close(self) -> None:
        """Remove the place, unless this process has entered it."""


class HostPlace:
    """The node itself: mounts and folders already are where the job wants them."""

    is_image = False
    is_entered = False

    def __init__(self, job: Job, *, watches: bool) -> None:
        self._job = job
        self._watches = watches
        self.answers: Answers = {}

    def bind(self, source: Path, target: str) -> None:
        pass

    def show_folder(self, folder: Path, name: str) -> str:
        return str(folder)

    def request(self, request: "SetupRequest") -> "SetupRequest":
        return replace(request, answers=self.answers)

    def enter(self) -> None:
        pass

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        from bootseer.launch.caches.packages import may_have_caches

        if not self._job.kept and not may_have_caches(command, os.environ, self.answers):
            return None
        from bootseer.launch.caches.finding import CacheJob

        return CacheJob(command, os.environ, answers=self.answers)

    def show(self, folder: Path, path: str) -> None:
        pass

    def arguments(self, command: tuple[str, ...]) -> tuple[str, ...]:
        return command

    def environment(self) -> dict[str, str]:
        return recording_environment(os.environ) if self._watches else dict(os.environ)

    def enter_copy(self) -> None:
        pass

    def become(self, arguments: tuple[str, ...]) -> NoReturn:
        hand_over()
        if self._watches:
            os.environ.update(recording_environment(os.environ))
        execute(arguments)

    def close(self) -> None:
        pass


class ImagePlace:
    """A container of an image."""

    is_image = True

    def __init__(self, job: Job, container: "Container", *, watches: bool) -> None:
        self._job = job
        self._container = container
        self._watches = watches
        self.answers: Answers = {}

    @property
    def is_entered(self) -> bool:
        return self._container.has_namespace

    def bind(self, source: Path, target: str) -> None:
        self._container.bind(source, target)

    def show_folder(self, folder: Path, name: str) -> str:
        target = f"{_FOLDERS_INSIDE}/{name}"
        _give(self._container, folder)
        self._container.bind(folder, target)
        return target

    def request(self, request: "SetupRequest") -> "SetupRequest":
        container = self._container
        container.enter()
        return replace(
            request,
            # Not the digest of the index: publishing the image gives it another index.
            base=container.image.record.identity,
            root=container.root,
            scratch=container.scratch / "setups",
            layers=_layers(container),
            directory=container.config.working_dir or "/",
            environ=self._plain_environment(),
            runner=container.run,
            answers=self.answers,
        )

    def enter(self) -> None:
        self._container.enter()

    def cache_job(self, command: tuple[str, ...]) -> "CacheJob | None":
        from bootseer.launch.caches.finding import CacheJob
        from bootseer.prefetch.container.process import arguments_of

        container = self._container
        return CacheJob(
            command or arguments_of(container.config, (), self._job.entrypoint),
            self._plain_environment(),
            root=container.root,
            directory=container.config.working_dir or "/",
            base=container.image.record.identity,
            runner=container.run,
            binds=tuple((bind.target, bind.source) for bind in container.binds),
            answers=self.answers,
        )

    def show(self, folder: Path, path: str) -> None:
        from bootseer.linux.namespaces import MS_BIND, mount
        from bootseer.linux.root_paths import resolve_in_root

        container = self._container
        _give(container, folder)
        place: Path = resolve_in_root(container.root, path)
        place.mkdir(parents=True, exist_ok=True)
        mount(folder, place, flags=MS_BIND)

    def arguments(self, command: tuple[str, ...]) -> tuple[str, ...]:
        from bootseer.prefetch.container.process import arguments_of

        return arguments_of(self._container.config, command, self._job.entrypoint)

    def environment(self) -> dict[str, str]:
        environment = self._plain_environment()
        if self._watches:
            environment = recording_environment(environment, _PACKAGE_INSIDE)
        return environment

    def enter_copy(self) -> None:
        self._container.enter_copy()

    def become(self, arguments: tuple[str, ...]) -> NoReturn:
        environment = self.environment()
        hand_over()
        self._container.exec(arguments, environment)

    def close(self) -> None:
        self._container.close()

    def _plain_environment(self) -> dict[str, str]:
        """Return this process's environment variables as a program in the container gets them."""
        environment = self._container.job_environment(os.environ)
        if any(bind.target == _TIMELINE for bind in self._container.binds):
            environment[FILE_VARIABLE] = _TIMELINE
        else:
            environment.pop(FILE_VARIABLE, None)
        return environment


def open_place(settings: Settings, job: Job, timeline: Timeline, say: Say) -> Place:
    """Return the place where `job` runs: the host, or a container of the job's image, mounted.

    The image is a name in the store, or a source from which missing layers are pulled; a pulled
    image is published in the background if the settings say so.

    Raises: BootseerError if the image cannot be had at all, or the runtime cannot be used.
    """
    watches = settings.trace_python and timeline.is_written
    if not job.image:
        return HostPlace(job, watches=watches)
    if job.runtime == "runc":
        from bootseer.prefetch.container.runc import check_runc

        check_runc()
    from bootseer.served.processes import TREE, start
    from bootseer.served.service import RUN, lingering_services

    with timeline.span("image") as span, contextlib.ExitStack() as stack:
        process = None
        # The server loads its code while this process resolves the image. If it cannot be begun,
        # mounting reports why. A lingering mount has its server already.
        with contextlib.suppress(BootseerError):
            if not any(lingering_services(settings.run_dir, RUN)):
                process = stack.enter_context(start(TREE, settings.run_dir, copy=True))
        from bootseer.prefetch.container.container import prepare_container
        from bootseer.prefetch.container.extracted import prepare_extracted
        from bootseer.prefetch.container.process import arguments_of
        from bootseer.prefetch.images.find import resolve_image

        resolved = resolve_image(settings, job.image, say=say, timeline=timeline.below(span))
        try:
            # Fail before anything is mounted if there is no command to run.
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
            say(f"warning: the image is extracted, since it cannot be mounted: {error}")
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
    from bootseer.prefetch.cache.indexes import read_kept_tree
    from bootseer.prefetch.images.mount import MountedImage
    from bootseer.snapshots.layers import Layers

    image = container.image
    tree = None
    if isinstance(image, MountedImage):
        settings, digest = image.settings, image.state.index_digest
        # Read once for all targets of a set-up: reading takes as long as scanning 1,000s of names.
        tree = functools.cache(
            functools.partial(read_kept_tree, settings.cache_dir, digest, run_dir=settings.run_dir)
        )
    return Layers(container.root, container.scratch / "upper", image.directory, tree)


def _show_timeline(container: "Container", path: Path) -> None:
    """Bind the timeline into the container, writable for the user that the job runs as."""
    container.bind(path, _TIMELINE)
    try:
        _give(container, path)
    except OSError as error:
        _log.debug("stages of the job itself will not be on the timeline: %s", error)


def _give(container: "Container", path: Path) -> None:
    """Make the user of the job the owner of a file or folder. Raises: OSError."""
    user = container.job_user()
    if user.uid and not container.rootless:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
