"""Plans for servers of mounted trees, and starting such a server.

Used for images, environments and volumes. Loads little, since the program that starts a server
waits for that. Thread-safe.
"""

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
from bootseer.served.ending import discard_server
from bootseer.served.processes import TREE, Process, start
from bootseer.served.ready_socket import new_ready_name
from bootseer.served.service import ServiceState, new_service_dir
from bootseer.settings.config import Settings

SUBTYPE = "bootseer-image"
"""Subtype of the FUSE mount."""

ENVIRONMENT = "environment"
"""Purpose of a mount that serves an environment."""

READAHEAD_BYTES = 32 * 1024
"""Read-ahead of the kernel in a mount. docs/format/trace.md has the measurement."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """Options of a mount, chosen by the process that mounts the tree."""

    workload: str | None = None
    """Workload whose bundle is used and whose starts are recorded; None: that of the settings."""
    purpose: str = "mount"
    """See `ServiceState`."""
    scratch: str = ""
    """Folder that is removed with the mount."""
    fingerprint: str = ""
    """See `ServiceState`."""
    watch_pid: int | None = None
    """Process with which the mount ends."""
    owner: tuple[int, int] | None = None
    """User and group ids that are shown for all files. For user namespaces, in which the image's
    owners do not exist."""
    is_local: bool = False
    """Whether this node made the index, of streams that it pulled; they may be stored nowhere."""
    checks_index: bool = True
    """Whether the server checks the digest of the index, and that its names form a tree. False if
    the process that starts the server does so, before the tree is shown to any program."""


DEFAULTS = ServeOptions()


class ServePlan(Struct, frozen=True):
    """Plan for one server, which gets it as a line of JSON on its standard input."""

    settings: Settings
    state: ServiceState
    state_dir: Path
    ready_name: str
    options: ServeOptions


class Serving:
    """Server that has got its plan. `wait` until the tree is mounted."""

    def __init__(self, plan: ServePlan, process: Process) -> None:
        self.plan = plan
        self._process: Process | None = process

    def go(self) -> None:
        """Tell the server that the index is in the node's cache. Idempotent."""
        if self._process is not None:
            self._process.go()

    def wait(self) -> ServePlan:
        """Call `go`, wait until the tree is mounted, and return the plan.

        Raises: as `mount_image`, at the first call; nothing is mounted then.
        """
        process, self._process = self._process, None
        try:
            if process is not None:
                process.wait()
        except BaseException:
            discard_server(self.plan.state_dir)
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
    """Give a server the plan to mount a tree on an existing directory. `wait` for the result.

    The tree is called `name` in messages. Its index must be in the node's cache by the time of
    `Serving.go`. `process` is a server process that was started ahead, and `state_dir` the state
    folder of its mount; by default both are new. Raises: as `mount_image`.
    """
    path = check_mount_point(directory)
    state_dir = state_dir or new_service_dir(settings.run_dir)
    state = ServiceState(
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
    )
    try:
        process = process or start(TREE, settings.run_dir, identity=state.id)
        process.tell(plan)
    except BaseException:
        discard_server(state_dir)
        raise
    return Serving(plan, process)


def check_mount_point(directory: Path) -> Path:
    """Check that a directory can be mounted on, and return its absolute path.

    Raises: BusyError, NotFoundError, InvalidInputError.
    """
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
