"""Mounting and unmounting of images, as `bootseer image mount` and `bootseer run --image` do it."""

from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.closing import Closing
from bootseer.errors import (
    BusyError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.fuse.kernel.unmount import unmount
from bootseer.linux import mount_table
from bootseer.prefetch.images.find import publish_later, resolve_image
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.serve.plan import (
    DEFAULTS,
    SUBTYPE,
    ServeOptions,
    begin_serving,
    check_mount_point,
)
from bootseer.served.control import ask
from bootseer.served.ending import end_server, sweep, sweep_dead
from bootseer.served.processes import Process
from bootseer.served.service import CHECKPOINT, ServiceState, live_mounts
from bootseer.settings.config import Settings


class MountedImage(Closing, Struct, frozen=True):
    """Mounted image, which a process of its own serves. Thread-safe."""

    settings: Settings
    record: ImageRecord
    state: ServiceState
    state_dir: Path
    ready_name: str
    """Socket name for BOOTSEER_READY_SOCKETS; the message "ready" ends the record."""

    @property
    def directory(self) -> Path:
        return Path(self.state.directory)

    def status(self) -> dict[str, Any]:
        """Return the server's `ImageServer.status`. Raises: UnavailableError, DeadlineError."""
        return ask(self.state_dir, "status")

    def ready(self) -> None:
        """End the record of the start now. Raises: UnavailableError, DeadlineError."""
        ask(self.state_dir, "ready")

    def detach(self) -> None:
        """Unmount in the server's mount namespace; copies in other namespaces stay mounted."""
        ask(self.state_dir, "detach")

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Unmount and wait for the server to end. Idempotent. Raises: BootseerError."""
        if self.state_dir.exists():
            end_server(self.state_dir, self.state, timeout_s)


def mount_image(
    settings: Settings,
    image: str | FoundImage,
    directory: Path,
    options: ServeOptions = DEFAULTS,
    *,
    state_dir: Path | None = None,
    process: Process | None = None,
) -> MountedImage:
    """Mount an image on an existing directory, and start to replay its bundle.

    Layers that were pulled for it are published in the background, if the settings say so. `image`
    is a name, a source or a result of `resolve_image`. `process` is a server process that was
    started ahead, and `state_dir` the state folder of its mount; by default both are new.

    Raises: NotFoundError, InvalidInputError, BusyError, UnsupportedError, UnavailableError,
    DeadlineError, CorruptError.
    """
    try:
        path = check_mount_point(directory)
    except BusyError:
        # The mount may be one that a dead server left.
        if not sweep(settings.run_dir):
            raise
        path = check_mount_point(directory)
    resolved = resolve_image(settings, image) if isinstance(image, str) else image
    try:
        plan = begin_serving(
            settings,
            resolved.record.reference,
            resolved.record.index_digest,
            path,
            replace(options, is_local=not resolved.is_published),
            state_dir=state_dir,
            process=process,
        ).wait()
    finally:
        # The server has opened the streams itself.
        resolved.release()
    publish_later(settings, resolved)
    return MountedImage(settings, resolved.record, plan.state, plan.state_dir, plan.ready_name)


def find_live_mount(settings: Settings, directory: Path) -> tuple[Path, ServiceState]:
    """Return state folder and state of the mount on `directory`. Raises: NotFoundError."""
    path = str(mount_table.absolute(directory))
    for state_dir, state in live_mounts(settings.run_dir):
        if state.directory == path and state.purpose != CHECKPOINT:
            return state_dir, state
    raise NotFoundError(
        f"nothing of Bootseer is mounted on {path}; `bootseer status` lists all mounts"
    )


def unmount_image(settings: Settings, directory: Path, *, timeout_s: float = 10.0) -> None:
    """Unmount the image on `directory`, also if its server died or hangs.

    Raises: NotFoundError; InvalidInputError if something else is mounted there; BootseerError.
    """
    try:
        state_dir, state = find_live_mount(settings, directory)
    except NotFoundError:
        left_over = mount_table.find_mount(directory)
        if left_over is None:
            # The tree of a container goes with its mount namespace, but not its state folder.
            if not sweep_dead(settings.run_dir, mount_table.absolute(directory)):
                raise
            return
        if left_over.subtype != SUBTYPE:
            raise InvalidInputError(
                f"cannot unmount {left_over.path}: the file system there is "
                f"fuse.{left_over.subtype}, not an image"
            ) from None
        # The server died: nothing answers, but the mount can be taken off.
        unmount(directory, timeout_s=timeout_s)
        sweep_dead(settings.run_dir, left_over.path)
        return
    end_server(state_dir, state, timeout_s)
