"""Form in which new files are stored: settings, and the rule of a directory.

Pure, except that `layout_in` reads the rule of a directory.
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
"""Name of a directory's rule: a file that holds the layout of new files beside it, as one word."""
_RULE_MAX_BYTES = 64


class StripeSettings(Struct, frozen=True):
    """Form of new files, and the longest wait for the storage."""

    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES
    """Files of at most this size are stored as ordinary files."""
    stripe_count: int = DEFAULT_STRIPE_COUNT
    deadline_s: float = 60.0
    layout: LayoutKind = "striped"
    """`plain`: as ordinary files that every tool reads, written in parallel where the storage can
    join files."""
    is_exact: bool = False
    """Whether the form is kept in any case: the rule of the directory is ignored, and a write fails
    rather than use fewer parts because memory is short."""

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        check_geometry(self.stripe_unit_bytes, self.stripe_count, self.block_bytes)
        if self.layout not in ("striped", "plain"):
            raise InvalidInputError(f"{self.layout!r} is no layout; choose striped or plain")

    @property
    def patience_s(self) -> float:
        """Return how long a read or a save waits while nothing moves.

        One call to the storage may take `deadline_s` of it.
        """
        return OUTAGE_DEADLINES * self.deadline_s

    @property
    def block_bytes(self) -> int:
        """Return the unit of verification of new files."""
        return min(DEFAULT_BLOCK_BYTES, self.stripe_unit_bytes)

    def layout_in(self, backend: Backend, directory: str) -> LayoutKind:
        """Return the layout of new large files in `directory`: its own rule's, or else `layout`.

        Raises: InvalidInputError where the rule is not one of the two words.
        """
        if self.is_exact:
            return self.layout
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
