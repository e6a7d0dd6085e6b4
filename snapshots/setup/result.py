"""What came of one set-up. Pure."""

from msgspec import Struct


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
    """Of "captured": what changed outside the targets meanwhile, as far as a short look told; of
    "restored": the first of that, as the snapshot has it."""

    @property
    def hit(self) -> bool:
        """Whether the command was not needed."""
        return self.how in ("in place", "restored")
