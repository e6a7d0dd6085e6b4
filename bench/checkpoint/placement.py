"""How fast the DataNodes could have been, from what each of them moved. Pure (no I/O)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes over each DataNode's link: what it sent, and what it was sent."""

    read_bytes: tuple[int, ...]
    written_bytes: tuple[int, ...]

    def __sub__(self, before: "Moved") -> "Moved":
        """What was moved since `before`."""
        return Moved(
            tuple(now - then for now, then in zip(self.read_bytes, before.read_bytes, strict=True)),
            tuple(
                now - then
                for now, then in zip(self.written_bytes, before.written_bytes, strict=True)
            ),
        )

    @property
    def per_datanode(self) -> tuple[int, ...]:
        """Both directions together."""
        return tuple(map(sum, zip(self.read_bytes, self.written_bytes, strict=True)))


def allowed_s(moved: Moved, rates: Sequence[float | None]) -> float:
    """How long the busiest link needs for its bytes: nobody can be faster with this placement.

    `rates` in bytes/s, one per DataNode and for each direction; None: no limit.
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
    """How long the same bytes would take, spread over all DataNodes by their rates."""
    total = sum(rate for rate in rates if rate is not None)
    busier = max(sum(moved.read_bytes), sum(moved.written_bytes))
    return busier / total if total else 0.0


def placement_figures(moved: Moved, rates: Sequence[float | None]) -> Mapping[str, float]:
    """What a sample says about the DataNodes."""
    each = moved.per_datanode
    figures = {
        "allowed_s": allowed_s(moved, rates),
        "even_s": even_s(moved, rates),
        "network_bytes": float(sum(each)),
        "busiest_bytes": float(max(each)),
    }
    return figures | {f"datanode_{index}_bytes": float(count) for index, count in enumerate(each)}
