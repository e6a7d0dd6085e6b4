"""The caller's side of a mounted tree: what its server is to do, and beginning and ending it.

Images, environments and volumes share it. Light: the program that starts a server loads no
more than this. Any thread.
"""

import os
import time
from pathlib import Path

from msgspec import Struct

from bootseer.errors import (
    BusyError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.linux import mount_table
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.cache.stream_keys import owner_of
from bootseer.served.ending import give_up
from bootseer.served.folders import MountState, new_mount_dir
from bootseer.served.processes import TREE, Process, start
from bootseer.served.ready_socket import new_ready_name
from bootseer.settings.config import Settings

SUBTYPE = "bootseer-image"
"""The subtype of the FUSE mount."""

ENVIRONMENT = "environment"
"""The purpose of a mount that serves an environment."""

READAHEAD_BYTES = 32 * 1024
"""The kernel's read-ahead at record and replay; see docs/format/trace.md for the measurement."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """How a tree is to be served: the choices of the caller that mounts it."""

    workload: str | None = None
    """Whose bundle is used, and whose starts are recorded; None: the settings' workload."""
    purpose: str = "mount"
    """As `MountState` has it."""
    scratch: str = ""
    """A folder that is removed with the mount."""
    fingerprint: str = ""
    """As `MountState` has it."""
    watch_pid: int | None = None
    """Unmount when this process ends."""
    owner: tuple[int, int] | None = None
    """Show everything as this user's: for user namespaces, which lack the image's owners."""
    is_local: bool = False
    """Whether this node made the index, of streams that it pulled; they may be stored nowhere."""
    checks_index: bool = True
    """Whether the server checks the index: its digest, and that its names form a tree. Else the
    process that starts it has just kept it, verified, checks its names meanwhile, and shows the
    tree to nobody before."""


DEFAULTS = ServeOptions()


class ServePlan(Struct, frozen=True):
    """What one server is to do: a line of JSON on its standard input."""

    settings: Settings
    state: MountState
    state_dir: Path
    ready_name: str
    options: ServeOptions
    allow_other: bool
    """Let other users' processes in."""

    @property
    def owner(self) -> str:
        """Return the image, for bytes in the node cache that serve this image alone."""
        return owner_of(self.state.index_digest, self.settings.store_url)


class Serving:
    """A server that knows what it is to serve. `wait` for it, or give it up."""

    def __init__(self, plan: ServePlan, process: Process) -> None:
        self.plan = plan
        self._process: Process | None = process

    def go(self) -> None:
        """The index is in the node's cache. Idempotent."""
        if self._process is not None:
            self._process.go()

    def wait(self) -> ServePlan:
        """`go`, and until the tree is mounted; what its server carries out. Raises, once: as
        `mount_image`; nothing is mounted then."""
        process, self._process = self._process, None
        try:
            if process is not None:
                process.wait()
        except BaseException:
            give_up(self.plan.state_dir)
            raise
        return self.plan


def begin_serving(
    settings: Settings,
    name: str,
    index_digest: str,
    directory: Path,
    options: ServeOptions = DEFAULTS,
    *,
    state_dir: Path | None = None,
    process: Process | None = None,
) -> Serving:
    """Have a server mount the tree whose index this node's cache holds, at `Serving.go` at the
    latest, on `directory`, an existing one, as `mount_image` does; `wait` for it. `name` is what
    people will see.

    `process` serves it, if one was begun for the mount that `state_dir` is for.
    Raises: as `mount_image`.
    """
    path = check_mount_point(directory)
    state_dir = state_dir or new_mount_dir(settings.run_dir)
    state = MountState(
        id=state_dir.name,
        reference=name,
        index_digest=index_digest,
        workload=options.workload or settings.workload,
        directory=str(path),
        pid=0,
        started_ns=time.time_ns(),
        purpose=options.purpose,
        scratch=options.scratch,
        fingerprint=options.fingerprint,
        user=None if options.watch_pid is None else ProcessId.of(options.watch_pid),
        owner=options.owner,
    )
    plan = ServePlan(
        settings=settings,
        state=state,
        state_dir=state_dir,
        ready_name=new_ready_name(),
        options=options,
        # Other users' processes in a container are let in; without root the kernel refuses.
        allow_other=os.geteuid() == 0,
    )
    try:
        process = process or start(TREE, settings.run_dir, identity=state.id)
        process.tell(plan)
    except BaseException:
        give_up(state_dir)
        raise
    return Serving(plan, process)


def check_mount_point(directory: Path) -> Path:
    """The directory's absolute path. Raises: BusyError, NotFoundError, InvalidInputError."""
    path = mount_table.absolute(directory)
    if mount_table.find_mount(path) is not None:
        raise BusyError(
            f"cannot mount on {path}: a FUSE file system is mounted there; unmount it first (an "
            f"image: `bootseer unmount {path}`)"
        )
    if not path.is_dir():
        if path.exists():
            raise InvalidInputError(f"cannot mount on {path}: it is not a directory")
        raise NotFoundError(f"cannot mount on {path}: there is no such directory; create it")
    return path
