"""How far ahead of a start its bundle's pieces are handed to the kernel. Pure.

As the kernel reads files ahead: what is read one after the other in the order of the bundle makes
the window grow, from one piece on. So what is handed over and not needed is less than what is, and
a start still shows what its bundle has too much.
"""

_WINDOW_MAX = 64
"""Pieces of 20 KB on average: two milliseconds' work, and a hundredth of a large start."""
_MARKED_MIN = 8
"""From this many on, one amid them is kept back: when it is asked for, the next window is due, and
there is time to hand it over."""


class PreloadWindow:
    """The window of one start. Not thread-safe."""

    def __init__(self, count: int) -> None:
        """`count`: of all pieces."""
        self._count = count
        self._handed = bytearray(count)
        self._next = 0
        self._size = 1
        self._marker = -1

    def is_handed(self, number: int) -> bool:
        """Whether `after` gave out this piece. May be asked by any thread."""
        return bool(self._handed[number])

    def after(self, number: int) -> list[int]:
        """Which pieces to hand over now that this one was asked for; itself first."""
        if self._handed[number]:
            return []
        if number == self._marker:
            start = self._next
            self._size = min(2 * self._size, _WINDOW_MAX)
        elif number < self._next:
            # Left out before, as it seemed not to be needed.
            return self._take([number])
        else:
            start = number + 1
            is_near = number - self._next <= self._size
            self._size = min(2 * self._size, _WINDOW_MAX) if is_near and self._next else 1
        self._next = stop = min(start + self._size, self._count)
        self._marker = (start + stop) // 2 if stop - start >= _MARKED_MIN else -1
        return self._take([number, *(n for n in range(start, stop) if n != self._marker)])

    def _take(self, numbers: list[int]) -> list[int]:
        found = [number for number in numbers if not self._handed[number]]
        for number in found:
            self._handed[number] = 1
        return found
