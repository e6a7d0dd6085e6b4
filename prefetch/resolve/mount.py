"""Mounting an image: start its server, wait until it is ready, talk to it, take it down.

The caller's side of `prefetch.serve`. `MountedImage` may be used from any thread.
"""

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
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.resolve.find import publish_later, resolve_image
from bootseer.prefetch.serve.plan import (
    DEFAULTS,
    SUBTYPE,
    ServeOptions,
    begin_serving,
    check_mount_point,
)
from bootseer.served.control import ask
from bootseer.served.ending import end_server, sweep, sweep_dead
from bootseer.served.folders import CHECKPOINT, MountState, live_mounts
from bootseer.served.processes import Process
from bootseer.settings.config import Settings


class MountedImage(Closing, Struct, frozen=True):
    """An image's tree, mounted and served by a process of its own."""

    settings: Settings
    record: ImageRecord
    state: MountState
    state_dir: Path
    ready_name: str
    """For BOOTSEER_READY_SOCKETS: who sends "ready" there ends the record."""

    @property
    def directory(self) -> Path:
        """Returns the directory on which the tree is mounted."""
        return Path(self.state.directory)

    def status(self) -> dict[str, Any]:
        """See `server.ImageServer.status`. Raises: UnavailableError, DeadlineError."""
        return ask(self.state_dir, "status")

    def ready(self) -> None:
        """End the record now. Raises: UnavailableError, DeadlineError."""
        ask(self.state_dir, "ready")

    def detach(self) -> None:
        """Take the mount off this namespace; copies in other namespaces keep it alive."""
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
    """Mount the image `image`, a name or a source, on `directory`, an existing one. It works when
    this returns. What of it was pulled is published in the background, if settings say so.

    The workload's bundle is on its way by then. `process` serves the image, if one was begun, and
    `state_dir` is named after it.

    Raises: NotFoundError, InvalidInputError, BusyError, UnsupportedError, UnavailableError,
    DeadlineError, CorruptError.
    """
    try:
        path = check_mount_point(directory)
    except BusyError:
        # By a server that died, perhaps.
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
        # The server has the streams open by now.
        resolved.release()
    publish_later(settings, resolved)
    return MountedImage(settings, resolved.record, plan.state, plan.state_dir, plan.ready_name)


def find_live_mount(settings: Settings, directory: Path) -> tuple[Path, MountState]:
    """(state folder, state) of what is mounted on `directory`. Raises: NotFoundError."""
    path = str(mount_table.absolute(directory))
    for state_dir, state in live_mounts(settings.run_dir):
        if state.directory == path and state.purpose != CHECKPOINT:
            return state_dir, state
    raise NotFoundError(
        f"nothing of Bootseer is mounted on {path}; `bootseer status` shows what is mounted"
    )


def unmount_image(settings: Settings, directory: Path, *, timeout_s: float = 10.0) -> None:
    """Unmount what `mount_image` mounted on `directory`, whatever state its server is in.

    Raises: NotFoundError, InvalidInputError where something else is mounted, BootseerError.
    """
    try:
        state_dir, state = find_live_mount(settings, directory)
    except NotFoundError:
        left_over = mount_table.find_mount(directory)
        if left_over is None:
            # A container's own tree went with its mount namespace; what its server left did not.
            if not sweep_dead(settings.run_dir, mount_table.absolute(directory)):
                raise
            return
        if left_over.subtype != SUBTYPE:
            raise InvalidInputError(
                f"cannot unmount {left_over.path}: fuse.{left_over.subtype} is mounted there, no "
                "image"
            ) from None
        # Its server died: the mount answers nothing but can be taken off.
        unmount(directory, timeout_s=timeout_s)
        sweep_dead(settings.run_dir, left_over.path)
        return
    end_server(state_dir, state, timeout_s)
