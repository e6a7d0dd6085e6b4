"""How a checkpoint tree is to be mounted: what travels from a command to the server's process.

Immutable values.
"""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.linux.processes import ProcessId

MODULE = "bootseer.fuse.striped.mounted.server"
"""The module of the server's process."""
SUBTYPE = "bootseer-stripe"
SHUTDOWN_S = 10.0
JOURNAL = "journal"
"""The journal in the server's folder: what its successor needs."""


class MountSpec(Struct, frozen=True, kw_only=True):
    """How to mount; travels from the command to the server process."""

    url: str
    directory: str
    run_dir: str
    memory_bytes: int
    deadline_s: float
    read_only: bool = False
    allow_other: bool = False
    """Let other users in, as far as modes and owner (this user) allow."""
    everyone_writes: bool = False
    """Every user who reaches the mount may do everything: for one that only a container can
    reach."""
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    stripe_count: int = DEFAULT_STRIPE_COUNT
    layout: LayoutKind = "striped"
    uid: int | None = None
    """The owner of everything that is shown; None: the user who mounts."""
    gid: int | None = None
    umask: int = 0o022
    """Permissions that nothing has; the kernel checks access by the rest."""
    lifetime_pid: int | None = None
    """The server unmounts and ends when this process has ended."""
    lifetime_started: str = ""
    """When that process started (`processes.start_time`)."""
    warm: bool = False
    """Read the newest checkpoint ahead as soon as the mount works."""
    metrics_dir: Path | None = None
    """The folder of figures for Prometheus; None: they are not written."""
    shutdown_s: float = SHUTDOWN_S
    """How long open files may stay open when the server is told to end; then they are cut off."""

    @property
    def user(self) -> ProcessId | None:
        """The process that the mount is for."""
        if self.lifetime_pid is None:
            return None
        return ProcessId(self.lifetime_pid, self.lifetime_started)

    @property
    def fingerprint(self) -> str:
        """The same for mounts that the next job can use as its own."""
        import hashlib

        shared = replace(self, lifetime_pid=None, lifetime_started="")
        return hashlib.sha256(to_line(shared).encode()).hexdigest()

    @property
    def stripe_settings(self) -> StripeSettings:
        """Raises: InvalidInputError."""
        return StripeSettings(
            self.stripe_unit_bytes, self.stripe_count, self.deadline_s, self.layout
        )


class CheckpointPlan(Struct, frozen=True):
    """What one server is to do: a line of JSON on its standard input."""

    spec: MountSpec
    state_dir: Path
