"""What a server of a mounted tree is to do, and how it is handed that. Pure.

Light: whoever starts a server loads no more than this.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.structs import asdict
from bootseer.prefetch.cache.stream_keys import claimant_of
from bootseer.prefetch.mounts.mount_state import MountState
from bootseer.settings.config import Settings
from bootseer.settings.settings_json import settings_from_json, settings_to_json

SUBTYPE = "bootseer-image"
"""Of the FUSE mount."""

ENVIRONMENT = "snapshot"
"""The purpose of a mount that serves an environment."""

RECORD_MODES = ("auto", "always", "never")

READAHEAD_BYTES = 32 * 1024
"""The kernel's read-ahead at record and replay; see docs/format/trace.md for the measurement."""

WINDOW_S = 120.0
"""A start that has not said `ready()` after two minutes is taken for over."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """How a tree is to be served: what whoever mounts one may choose."""

    workload: str | None = None
    """Whose bundle is used, and whose starts are recorded; None: the settings' workload."""
    record: str = "auto"
    """One of `RECORD_MODES`. "auto" records where there is no bundle, or where it missed or wasted
    much."""
    prefetch: bool = True
    """Bring the workload's bundle, if there is one."""
    window_s: float = WINDOW_S
    """A record ends after this many seconds at the latest."""
    readahead_bytes: int = READAHEAD_BYTES
    purpose: str = "mount"
    """As `MountState` has it."""
    scratch: str = ""
    """A folder that is removed with the mount."""
    watch_pid: int | None = None
    """Unmount when this process ends."""
    owner: tuple[int, int] | None = None
    """Show everything as this user's: for user namespaces, which lack the image's owners."""
    is_local: bool = False
    """Whether this node made the index, of streams that it pulled; they may be stored nowhere."""
    checks_index: bool = True
    """Whether the server checks the index: its digest, and that its names form a tree. Else whoever
    starts it has just kept it, verified, checks its names meanwhile, and shows the tree to nobody
    before."""


DEFAULTS = ServeOptions()


class ServePlan(Struct, frozen=True):
    """What one server is to do."""

    settings: Settings
    state: MountState
    state_dir: Path
    ready_name: str
    record: str
    """This and what follows is as in `ServeOptions`."""
    prefetch: bool
    window_s: float
    readahead_bytes: int
    watch_pid: int | None
    owner: tuple[int, int] | None
    is_local: bool
    checks_index: bool
    allow_other: bool
    """Let other users' processes in."""

    @property
    def claimant(self) -> str:
        """For whom bytes that nothing proves yet are believed."""
        return claimant_of(self.state.index_digest, self.settings.store_url)


def plan_to_json(plan: ServePlan) -> dict[str, Any]:
    """For the server's standard input."""
    return {
        **{name: getattr(plan, name) for name in _PLAIN},
        "settings": settings_to_json(plan.settings),
        "state": asdict(plan.state),
        "state_dir": str(plan.state_dir),
    }


_PLAIN = (
    "ready_name",
    "record",
    "prefetch",
    "window_s",
    "readahead_bytes",
    "watch_pid",
    "owner",
    "is_local",
    "checks_index",
    "allow_other",
)


def plan_from_json(document: Mapping[str, Any]) -> ServePlan:
    """The inverse; the document is our own."""
    plain = {name: document[name] for name in _PLAIN}
    owner = plain["owner"]
    plain["owner"] = None if owner is None else (owner[0], owner[1])
    return ServePlan(
        settings=settings_from_json(document["settings"]),
        state=MountState(**document["state"]),
        state_dir=Path(document["state_dir"]),
        **plain,
    )
