"""What of a cache belongs together, what of it is new, and what goes first. Pure (no I/O).

A *unit* is what two nodes' caches are merged by: all of its files come from one node. Files whose
names are digests (of sources, flags and versions: TorchInductor, Triton, CUDA) are units by
themselves, or with the others of a directory so named; else a directory is one unit with whatever
lies directly in it, since an index there may name its neighbours (Numba's `.nbi`, databases).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

# Base 32 of 128 bits and more, or as many bits in hexadecimal.
_DIGEST = re.compile(rb"[a-z2-7]{26,}|[A-Z2-7]{26,}|[0-9a-f]{32,}|[0-9A-F]{32,}")


class File(Struct, frozen=True):
    """A file of a cache, as far as it matters here."""

    size_bytes: int
    used_ns: int = 0
    """When it was last made or read, as far as that can be told."""
    put_ns: int = 0
    """When it was put there."""


def unit_of(path: bytes) -> bytes:
    """The unit that a relative path belongs to: a path, with "/" at its end for a directory."""
    parts = path.split(b"/")
    for number, part in enumerate(parts[:-1]):
        if _DIGEST.fullmatch(part):
            return b"/".join(parts[: number + 1]) + b"/"
    return path if _DIGEST.search(parts[-1]) else b"/".join(parts[:-1]) + b"/"


def is_keyed(unit: bytes) -> bool:
    """Whether the unit's name is a digest, so that another node's content of it is as good."""
    return bool(_DIGEST.search(unit.rstrip(b"/").rpartition(b"/")[2]))


def by_unit(paths: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """The paths of each unit."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for path in paths:
        found[unit_of(path)].append(path)
    return dict(found)


def new_units(
    here: Mapping[bytes, File], there: Mapping[bytes, int], *, with_changed: bool
) -> dict[bytes, list[bytes]]:
    """The units here that a generation, paths and sizes in `there`, has not.

    `with_changed`: also units that are no digests and have other files or sizes now. Compilers give
    no two nodes the same bytes, so what differs in content alone is not new.
    """
    stored = by_unit(there)
    found = {}
    for unit, paths in by_unit(here).items():
        if unit not in stored:
            found[unit] = paths
        elif with_changed and not is_keyed(unit):
            sizes = {path: here[path].size_bytes for path in paths}
            if sizes != {path: there[path] for path in stored[unit]}:
                found[unit] = paths
    return found


def of_start(here: Mapping[bytes, File], there: Mapping[bytes, int], begun_ns: int) -> set[bytes]:
    """In a folder that is not ours alone, the paths that belong to the key: units that were put
    there since the start began, and those that the generation has as they are."""
    stored = by_unit(there)
    found: set[bytes] = set()
    for unit, paths in by_unit(here).items():
        sizes = {path: here[path].size_bytes for path in paths}
        if all(here[path].put_ns >= begun_ns for path in paths) or (
            unit in stored and sizes == {path: there[path] for path in stored[unit]}
        ):
            found.update(paths)
    return found


def within(files: Mapping[bytes, File], limit_bytes: int) -> set[bytes]:
    """The paths that stay where no more than `limit_bytes` may: whole units, those that were used
    last; of equally old ones the first by name."""
    units = by_unit(files)
    order = sorted(
        units, key=lambda unit: (-max(files[path].used_ns for path in units[unit]), unit)
    )
    kept: set[bytes] = set()
    left = limit_bytes
    for unit in order:
        size = sum(files[path].size_bytes for path in units[unit])
        if size <= left:
            left -= size
            kept.update(units[unit])
    return kept
