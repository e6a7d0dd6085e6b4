"""Joining stored files into one, where the storage can do that without moving bytes."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from bootseer.store.backend import Backend


@runtime_checkable
class JoinsFiles(Protocol):
    """A backend that can join files. Thread-safe."""

    def can_join(self) -> bool:
        """Whether the server at the other end can, and lets us. Asked once, then remembered."""
        ...

    def join(self, target: str, sources: Sequence[str]) -> None:
        """Append `sources`, in order, to the file `target` in one atomic step; they vanish.

        All are closed files of ours. Raises: NotFoundError, UnavailableError, DeadlineError.
        """
        ...


def joiner(backend: Backend) -> JoinsFiles | None:
    """`backend` as one that can join files; None where it cannot."""
    if isinstance(backend, JoinsFiles) and backend.can_join():
        return backend
    return None
