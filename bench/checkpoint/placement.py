"""Lower limits of a transfer's time, from the bytes of each DataNode. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes over each DataNode's link: sent by the DataNode, and received by it."""

    read_bytes: tuple[int, ...]
    written_bytes: tuple[int, ...]

    def __sub__(self, before: "Moved") -> "Moved":
        """Return the bytes moved since `before`."""
        return Moved(
            tuple(now - then for now, then in zip(self.read_bytes, before.read_bytes, strict=True)),
            tuple(
                now - then
                for now, then in zip(self.written_bytes, before.written_bytes, strict=True)
            ),
        )

    @property
    def per_datanode(self) -> tuple[int, ...]:
        """Bytes of each DataNode in both directions together."""
        return tuple(map(sum, zip(self.read_bytes, self.written_bytes, strict=True)))


def allowed_s(moved: Moved, rates: Sequence[float | None]) -> float:
    """Return the time that the busiest link needs: no client can be faster with this placement.

    `rates` are in bytes/s, one for each DataNode, for each direction; None: no limit.
    """
    return max(
        (
            count / rate
            for direction in (moved.read_bytes, moved.written_bytes)
            for count, rate in zip(direction, rates, strict=True)
            if rate is not None
        ),
        default=0.0,
    )


def even_s(moved: Moved, rates: Sequence[float | None]) -> float:
    """Return the time for the same bytes if they were spread over all DataNodes by their rates."""
    total = sum(rate for rate in rates if rate is not None)
    busier = max(sum(moved.read_bytes), sum(moved.written_bytes))
    return busier / total if total else 0.0


def placement_figures(moved: Moved, rates: Sequence[float | None]) -> Mapping[str, float]:
    """Return the figures of a sample that describe the DataNodes."""
    each = moved.per_datanode
    figures = {
        "allowed_s": allowed_s(moved, rates),
        "even_s": even_s(moved, rates),
        "network_bytes": float(sum(each)),
        "busiest_bytes": float(max(each)),
    }
    return figures | {f"datanode_{index}_bytes": float(count) for index, count in enumerate(each)}
