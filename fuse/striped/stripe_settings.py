"""How new files are stored: the settings of a mount, and the rule of a directory.

Pure, but for one small read.
"""

from typing import Literal

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.fuse.striped.layout import (
    DEFAULT_BLOCK_BYTES,
    DEFAULT_STRIPE_COUNT,
    DEFAULT_STRIPE_UNIT_BYTES,
    check_geometry,
)
from bootseer.store.backend import Backend
from bootseer.store.paths import check_deadline
from bootseer.transfer.policy import OUTAGE_DEADLINES

LayoutKind = Literal["striped", "plain"]

DIRECTORY_RULE = ".bootseer-layout"
"""A file of this name decides for the files beside it: its content is the word."""
_RULE_MAX_BYTES = 64


class StripeSettings(Struct, frozen=True):
    """How new files are stored."""

    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    """Files of at most this size are stored as ordinary files."""
    stripe_count: int = DEFAULT_STRIPE_COUNT
    deadline_s: float = 60.0
    layout: LayoutKind = "striped"
    """`plain`: as ordinary files that every tool reads, written in parallel where the storage can
    join files."""

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        check_geometry(self.stripe_unit_bytes, self.stripe_count, self.block_bytes)
        if self.layout not in ("striped", "plain"):
            raise InvalidInputError(f"{self.layout!r} is no layout; choose striped or plain")

    @property
    def patience_s(self) -> float:
        """How long a read or a save waits while nothing moves. One call to the storage may take
        `deadline_s` of it."""
        return OUTAGE_DEADLINES * self.deadline_s

    @property
    def is_asked_for(self) -> bool:
        """Whether a file is to be so and not otherwise, whatever there is memory for."""
        return False

    @property
    def block_bytes(self) -> int:
        """The unit of verification of new files."""
        return min(DEFAULT_BLOCK_BYTES, self.stripe_unit_bytes)

    def layout_in(self, backend: Backend, directory: str) -> LayoutKind:
        """The layout of new large files in `directory`: the directory's own rule, else this one's.

        Raises: InvalidInputError where the rule is not one of the two words.
        """
        path = f"{directory}/{DIRECTORY_RULE}" if directory else DIRECTORY_RULE
        try:
            word = backend.read(path, 0, _RULE_MAX_BYTES).strip()
        except NotFoundError:
            return self.layout
        if word == b"striped":
            return "striped"
        if word == b"plain":
            return "plain"
        raise InvalidInputError(f"{backend.url}/{path} must hold the word striped or plain")
