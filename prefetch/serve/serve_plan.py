"""What a server of a mounted tree is to do, and how it is handed that. Pure.

Light: the program that starts a server loads no more than this.
"""

from pathlib import Path

from msgspec import Struct

from bootseer.prefetch.cache.stream_keys import owner_of
from bootseer.served.folders import MountState
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
    readahead_bytes: int = READAHEAD_BYTES
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
