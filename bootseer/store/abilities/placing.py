"""Which servers take a file that is being written, where the storage lets a writer choose."""

from collections.abc import Collection
from typing import Protocol, runtime_checkable


@runtime_checkable
class PlacesFiles(Protocol):
    """A backend that does. Thread-safe. Nothing raises: nothing depends on it but speed."""

    @property
    def is_one_rack(self) -> bool:
        """Whether replicas may lie on any servers: as far as is known, none are nearer to each
        other than the rest."""
        ...

    def place(self, path: str, avoid: Collection[str]) -> tuple[str, ...] | None:
        """Have servers chosen, other than `avoid`, for the first block of a file that was just
        created, before anything is written to it.

        Returns them, one for each replica; empty where nobody says; None where there are too few
        others, and nothing was chosen.
        """
        ...

    def servers_of(self, path: str) -> tuple[str, ...]:
        """The servers that take the block which is being written now, one for each replica.

        Empty where nobody says.
        """
        ...
