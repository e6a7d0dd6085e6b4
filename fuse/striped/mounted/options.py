"""Options of a checkpoint mount: the plan of its server, and the option names for mount(8).

Immutable values. The names in lists of mount options ("ro,memory=1GiB") are also used in fstab(5)
and for volumes of Kubernetes.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.stripe_settings import LayoutKind, StripeSettings
from bootseer.linux.processes import ProcessId
from bootseer.settings.values import parse_size

SUBTYPE = "bootseer-stripe"
SHUTDOWN_S = 10.0
FANOUT = "fanout"
"""Name of the file in the server's folder with the address of the fan-out of the mount's start."""
JOURNAL = "journal"
"""Name of the journal in the server's folder, from which a successor continues."""


class MountSpec(Struct, frozen=True, kw_only=True):
    """Description of a mount, which the command sends to the server process."""

    url: str
    directory: str
    run_dir: str
    memory_bytes: int
    deadline_s: float
    read_only: bool = False
    allow_other: bool = False
    """Whether other users may access the mount, if modes and owner (this user) allow it."""
    everyone_writes: bool = False
    """Whether all users may do everything: for a mount that only a container can reach."""
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    stripe_count: int = DEFAULT_STRIPE_COUNT
    layout: LayoutKind = "striped"
    uid: int | None = None
    """Owner of all files; None: the user who mounts."""
    gid: int | None = None
    umask: int = 0o022
    """Permission bits that no file has; the kernel checks access by the remaining bits."""
    user: ProcessId | None = None
    """Process that uses the mount: the server unmounts and ends when this process has ended."""
    read_newest: bool = False
    """Whether to read the newest checkpoint ahead as soon as the mount works."""
    page_cache: bool = False
    """Whether reads go through the kernel's page cache, where a restarted worker of the job finds
    the bytes again."""
    metrics_dir: Path | None = None
    """Folder of figures for Prometheus; None: they are not written."""
    shutdown_s: float = SHUTDOWN_S
    """Longest wait of an ending server for open files to be closed."""

    @property
    def fingerprint(self) -> str:
        """Digest of the options; a job can take over a mount with the same digest."""
        shared = replace(self, user=None)
        return hashlib.sha256(to_line(shared).encode()).hexdigest()

    @property
    def stripe_settings(self) -> StripeSettings:
        """Settings of new files. Raises: InvalidInputError."""
        return StripeSettings(
            self.stripe_unit_bytes, self.stripe_count, self.deadline_s, self.layout
        )


class CheckpointPlan(Struct, frozen=True):
    """Plan of a server: a line of JSON on its standard input."""

    spec: MountSpec
    state_dir: Path


# ---- mount options ---------------------------------------------------------------------------

# Options for mount(8), fstab(5) and systemd only, and options that always hold here.
_IGNORED = frozenset(
    (
        *("defaults", "rw", "auto", "noauto", "nofail"),
        *("user", "nouser", "users", "owner", "group"),
        *("_netdev", "async", "noatime", "nodiratime", "relatime", "strictatime", "lazytime"),
        *("nosuid", "nodev", "exec", "noiversion"),
    )
)
_IGNORED_PREFIXES = ("x-", "X-", "comment=")
_FLAGS = {
    "ro": "read_only",
    "allow_other": "allow_other",
    "read_newest": "read_newest",
    "page_cache": "page_cache",
    "immutable": "immutable",
}


_ID_MAX = 2**32 - 2
"""Largest number of a user or group; the next number means none."""


def _bounded(convert: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def checked(text: str) -> float:
        number = convert(text)
        # This form of the comparison refuses NaN, too.
        if not least <= number <= most:
            raise ValueError(f"it is not from {least:g} to {most:g}")
        return number

    return checked


_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "uid": ("uid", _bounded(int, 0, _ID_MAX)),
    "gid": ("gid", _bounded(int, 0, _ID_MAX)),
    "umask": ("umask", _bounded(lambda text: int(text, 8), 0, 0o777)),
    "memory": ("memory_bytes", parse_size),
    "deadline": ("deadline_s", _bounded(float, 0.001, 86_400)),
    "stripe_unit": ("stripe_unit_bytes", parse_size),
    "stripe_count": ("stripe_count", int),
    "layout": ("layout", str),
}


def parse_options(texts: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """Return arguments of `mount_spec` and `immutable`, and the run directory if one is given.

    Raises: InvalidInputError for an unknown option, which might matter.
    """
    chosen: dict[str, Any] = {}
    run_dir = None
    for option in (option for text in texts for option in text.split(",")):
        name, has_value, value = option.partition("=")
        if not option or option in _IGNORED or option.startswith(_IGNORED_PREFIXES):
            continue
        if option in _FLAGS:
            chosen[_FLAGS[option]] = True
        elif name == "run_dir" and value:
            run_dir = Path(value)
        elif name in _VALUES and has_value:
            argument, convert = _VALUES[name]
            try:
                chosen[argument] = convert(value)
            except ValueError as error:
                raise InvalidInputError(f"mount option {option!r}: {error}") from error
        else:
            raise InvalidInputError(
                f"mount option {option!r} is not known; there are "
                f"{', '.join([*_FLAGS, *(f'{name}=' for name in _VALUES), 'run_dir='])}"
            )
    return chosen, run_dir
