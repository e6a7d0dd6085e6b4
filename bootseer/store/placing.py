"""Which servers take a file that is being written, where the storage says so."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class PlacesFiles(Protocol):
    """A backend that knows. Thread-safe."""

    def servers_of(self, path: str) -> tuple[str, ...]:
        """The servers that take the block which is being written now, one for each replica.

        Empty where nobody says. Never raises: nothing depends on it but speed.
        """
        ...
