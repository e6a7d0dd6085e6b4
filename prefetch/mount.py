"""Mounting an image: start its server, wait until it is ready, talk to it, take it down.

The caller's side of `prefetch.serve`. `MountedImage` may be used from any thread.
"""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bootseer import background
from bootseer.config import Settings
from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.fuse.kernel import mounts
from bootseer.prefetch.control import ask, new_ready_name
from bootseer.prefetch.mount_state import (
    MountState,
    is_alive,
    live_mounts,
    log_path,
    new_mount_dir,
    wait_released,
)
from bootseer.prefetch.obtain import obtain_image
from bootseer.prefetch.obtained import ObtainedImage, publish_later
from bootseer.prefetch.records import ImageRecord
from bootseer.prefetch.serve import SUBTYPE, plan_to_json
from bootseer.prefetch.server import RECORD_MODES, ServePlan

READAHEAD_BYTES = 32 * 1024
"""The kernel's read-ahead at record and replay; see docs/format/trace.md for the measurement."""

WINDOW_S = 120.0
"""A start that has not said `ready()` after two minutes is taken for over."""

_log = logging.getLogger(__name__)

_START_S = 30.0
_FAILED_END_S = 3.0


@dataclass(frozen=True, slots=True)
class MountedImage:
    """An image's tree, mounted and served by a process of its own."""

    settings: Settings
    record: ImageRecord
    state: MountState
    state_dir: Path
    ready_name: str
    """For BOOTSEER_READY_SOCKETS: who sends "ready" there ends the record."""

    @property
    def directory(self) -> Path:
        """Where the tree is."""
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
            _unmount(self.state_dir, self.state, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def mount_image(
    settings: Settings,
    image: str | ObtainedImage,
    directory: Path,
    *,
    workload: str | None = None,
    record: str = "auto",
    prefetch: bool = True,
    window_s: float = WINDOW_S,
    readahead_bytes: int = READAHEAD_BYTES,
    purpose: str = "mount",
    state_dir: Path | None = None,
    scratch: str = "",
    watch_pid: int | None = None,
    owner: tuple[int, int] | None = None,
) -> MountedImage:
    """Mount the image `image`, a name or a source, on `directory`, an existing one. It works when
    this returns. What of it was pulled is published in the background, if settings say so.

    The bundle of `workload` (default: the settings') is on its way by then. `record`: "auto"
    records where there is no bundle yet or where it missed much; "always"; "never".
    `watch_pid`: unmount when that process ends.

    Raises: NotFoundError, InvalidInputError, BusyError, UnsupportedError, UnavailableError,
    DeadlineError, CorruptError.
    """
    path = _check_mount_point(directory)
    obtained = obtain_image(settings, image) if isinstance(image, str) else image
    try:
        plan = serve_tree(
            settings,
            obtained.record.reference,
            obtained.record.index_digest,
            path,
            workload=workload,
            record=record,
            prefetch=prefetch,
            window_s=window_s,
            readahead_bytes=readahead_bytes,
            purpose=purpose,
            state_dir=state_dir,
            scratch=scratch,
            watch_pid=watch_pid,
            owner=owner,
        )
    finally:
        # The server has the streams open by now.
        obtained.release()
    publish_later(settings, obtained)
    return MountedImage(settings, obtained.record, plan.state, plan.state_dir, plan.ready_name)


def serve_tree(
    settings: Settings,
    name: str,
    index_digest: str,
    directory: Path,
    *,
    workload: str | None = None,
    record: str = "auto",
    prefetch: bool = True,
    window_s: float = WINDOW_S,
    readahead_bytes: int = READAHEAD_BYTES,
    purpose: str = "mount",
    state_dir: Path | None = None,
    scratch: str = "",
    watch_pid: int | None = None,
    owner: tuple[int, int] | None = None,
) -> ServePlan:
    """Mount the tree whose index this node's cache holds on `directory`, an existing one, as
    `mount_image` does. `name` is what people will see. The plan that its server carries out.

    Raises: as `mount_image`.
    """
    if record not in RECORD_MODES:
        raise InvalidInputError(f"record is {record!r}; use one of {', '.join(RECORD_MODES)}")
    path = _check_mount_point(directory)
    state_dir = state_dir or new_mount_dir(settings)
    state = MountState(
        id=state_dir.name,
        reference=name,
        index_digest=index_digest,
        workload=workload or settings.workload,
        directory=str(path),
        pid=0,
        started_ns=time.time_ns(),
        purpose=purpose,
        scratch=scratch,
    )
    plan = ServePlan(
        settings=settings,
        state=state,
        state_dir=state_dir,
        ready_name=new_ready_name(),
        record=record,
        prefetch=prefetch,
        window_s=window_s,
        readahead_bytes=readahead_bytes,
        watch_pid=watch_pid,
        owner=owner,
        # Other users' processes in a container are let in; without root the kernel refuses.
        allow_other=os.geteuid() == 0,
    )
    try:
        _start_server(plan)
    except BaseException:
        # A server that did start unmounts and cleans up by itself, also when it finds nobody to
        # report to; until then the directory is still in use.
        if not wait_released(state_dir, _FAILED_END_S):
            # It was ready in the moment in which we were interrupted.
            with contextlib.suppress(BootseerError):
                _unmount(state_dir, state, _FAILED_END_S)
        if not is_alive(state_dir):
            shutil.rmtree(state_dir, ignore_errors=True)
        raise
    return plan


def _check_mount_point(directory: Path) -> Path:
    path = mounts.absolute(directory)
    if mounts.find_mount(path) is not None:
        raise BusyError(f"cannot mount on {path}: a FUSE file system is mounted there")
    if not path.is_dir():
        if path.exists():
            raise InvalidInputError(f"cannot mount on {path}: it is not a directory")
        raise NotFoundError(f"cannot mount on {path}: there is no such directory; create it")
    return path


def _start_server(plan: ServePlan) -> None:
    with background.start(
        "bootseer.prefetch.serve",
        json.dumps(plan_to_json(plan)),
        what=f"the server of {plan.state.directory}",
        log=log_path(plan.settings, plan.state.id),
        append=True,
    ) as starting:
        # It ends as soon as it has forked the server.
        try:
            starting.process.wait(_START_S)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"the image's server did not start in {_START_S:g} s") from error
        finally:
            # Nothing where it has ended, as it should.
            starting.process.kill()
            starting.process.wait()
        starting.await_ready(_START_S)


def find_live_mount(settings: Settings, directory: Path) -> tuple[Path, MountState]:
    """(state folder, state) of what is mounted on `directory`. Raises: NotFoundError."""
    path = str(mounts.absolute(directory))
    for state_dir, state in live_mounts(settings):
        if state.directory == path:
            return state_dir, state
    raise NotFoundError(
        f"no image is mounted on {path}; `bootseer image status` shows what is mounted"
    )


def unmount_image(settings: Settings, directory: Path, *, timeout_s: float = 10.0) -> None:
    """Unmount what `mount_image` mounted on `directory`, whatever state its server is in.

    Raises: NotFoundError, InvalidInputError where something else is mounted, BootseerError.
    """
    try:
        state_dir, state = find_live_mount(settings, directory)
    except NotFoundError:
        left_over = mounts.find_mount(directory)
        if left_over is None:
            raise
        if left_over.subtype != SUBTYPE:
            raise InvalidInputError(
                f"cannot unmount {left_over.path}: fuse.{left_over.subtype} is mounted there, no "
                "image; checkpoint folders are unmounted by `bootseer unmount`"
            ) from None
        # Its server died: the mount answers nothing but can be taken off.
        mounts.unmount(directory, timeout_s=timeout_s)
        return
    _unmount(state_dir, state, timeout_s)


def _unmount(state_dir: Path, state: MountState, timeout_s: float) -> None:
    path = Path(state.directory)
    try:
        mounts.unmount(path, timeout_s=timeout_s)
    except InvalidInputError:
        pass  # Detached, or unmounted by somebody else: the server ends by itself.
    if not wait_released(state_dir, timeout_s):
        if mounts.find_mount(path) is not None:
            raise DeadlineError(
                f"the server of {path} (process {state.pid}) did not end in {timeout_s:g} s"
            )
        # It may take a while to make a large cache durable; nobody needs to wait for that.
        _log.info("the server of %s still tidies up", path)
