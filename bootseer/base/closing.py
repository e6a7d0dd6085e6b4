"""Base class of objects that a `with` statement closes. As thread-safe as each class's `close`."""

from typing import Self


class Closing:
    """Context manager whose exit calls `close`."""

    __slots__ = ()

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
