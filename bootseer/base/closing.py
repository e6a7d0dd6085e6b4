"""What is closed at the end of a `with`. As thread-safe as the `close` of its class."""

from typing import Self


class Closing:
    """Closes itself at the end of a `with`, however that ends."""

    __slots__ = ()

    def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
