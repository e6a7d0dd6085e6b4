"""What the steps of one set-up on one node share: who asks for what, where, and what is known.

One thread uses an attempt. It decides nothing.
"""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from bootseer.served.background import ServerProcess
from bootseer.settings.config import Settings
from bootseer.snapshots.capture.layered_scan import scan_before
from bootseer.snapshots.setup.request import Report, Request
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import Scan


class SetupResult(Struct, frozen=True):
    """What `run_setup` did."""

    how: str
    """"in place" (was there already, untouched), "restored", "captured" (ran, and the snapshot is
    in the store) or "ran" (ran, nothing stored)."""
    fingerprint: str
    """Empty where it could not be computed."""
    targets: tuple[str, ...]
    file_count: int
    content_bytes: int
    moved_bytes: int
    """Over the network, to or from the store."""
    seconds: float
    setup_seconds: float
    """Seconds of the command itself, now or when the snapshot was made."""
    mode: str = ""
    """How it was restored: "mount", "link", "hardlink" or "extract"; empty where it was not."""
    mode_reason: str = ""
    ready_names: tuple[str, ...] = ()
    """For BOOTSEER_READY_SOCKETS: who sends "ready" there ends the records of mounts."""
    changed_outside: tuple[str, ...] = ()
    """What changed outside the targets while a set-up that was "captured" ran, as far as a short
    look told; of "restored": the first of that, as the snapshot has it."""
    is_changed: bool = False
    """Whether something else had lingered on the targets since the last start."""
    was_here: bool = False
    """Whether it was restored as a link to files that this node had already."""

    @property
    def hit(self) -> bool:
        """Whether the command was not needed."""
        return self.how in ("in place", "restored")


NoteWait = Callable[[str, int], Callable[[], object]]
"""Begins the stage of waiting for a node which is named; `created_ns` (0: not yet) is when that one
had made what was waited for. Gives what ends the stage."""


def no_wait(node: str, created_ns: int) -> Callable[[], object]:
    """The `NoteWait` of a set-up that has no timeline."""
    return lambda: None


class Attempt(Struct):
    """One call of `run_setup`."""

    settings: Settings
    request: Request
    report: Report
    started: float
    """When the attempt began, on the monotonic clock."""
    until_exit: bool
    """What is mounted goes when this process ends."""
    note: Callable[[Path, str, str, str], None]
    """Saves that a target holds a fingerprint, made on a base. See `state.remember`."""
    process: ServerProcess | None = None
    """Serves a mount, if one was begun."""
    targets: tuple[bytes, ...] = ()
    paths: dict[bytes, Path] = field(default_factory=dict)
    """The path of each target on this host."""
    locks: tuple[int, ...] = ()
    """Descriptors of the targets' locks, as long as they are held."""
    key: str = ""
    """The fingerprint; empty until it is known."""
    max_age_s: float = 0.0
    """How old a stored snapshot may be; 0: any age."""
    note_wait: NoteWait = no_wait
    is_changed: bool = False
    """Whether what had lingered on the targets was another one."""
    waited_s: float = 0.0
    """Seconds of waiting for another process or node that ran the same set-up."""

    def scan(self) -> dict[bytes, Scan]:
        """What the targets hold now."""
        layers = self.request.layers
        return {target: scan_before(layers, path) for target, path in self.paths.items()}

    def result(
        self,
        how: str,
        *,
        file_count: int = 0,
        content_bytes: int = 0,
        moved_bytes: int = 0,
        setup_s: float = 0.0,
        changed_outside: tuple[str, ...] = (),
    ) -> SetupResult:
        """What came of it by now."""
        return SetupResult(
            how=how,
            fingerprint=self.key,
            targets=tuple(text_of(target) for target in self.targets),
            file_count=file_count,
            content_bytes=content_bytes,
            moved_bytes=moved_bytes,
            seconds=time.monotonic() - self.started,
            setup_seconds=setup_s,
            changed_outside=changed_outside,
            is_changed=self.is_changed,
        )
