"""Grouping of cached files into units, and selection of units to publish or keep. Pure (no I/O).

A *unit* is the smallest part when the caches of two nodes are merged: all of its files come from
one node. A file whose name is a digest (of sources, flags and versions: TorchInductor, Triton,
CUDA) is a unit by itself, and so is a directory so named with everything below it. In any other
directory, all files that lie directly in it are one unit, since an index among them may name its
neighbours (Numba's `.nbi`, databases).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

# 128 bits or more, in base 32 or hexadecimal.
_DIGEST = re.compile(rb"[a-z2-7]{26,}|[A-Z2-7]{26,}|[0-9a-f]{32,}|[0-9A-F]{32,}")


class CacheFile(Struct, frozen=True):
    """Size and times of one cached file."""

    size_bytes: int
    used_ns: int = 0
    """Time of the last known use: when the file was made or read."""
    put_ns: int = 0
    """Time when the file was put into the folder."""


def unit_of(path: bytes) -> bytes:
    """Return the unit of a relative path, as a path; directories end in "/"."""
    parts = path.split(b"/")
    for number, part in enumerate(parts[:-1]):
        if _DIGEST.fullmatch(part):
            return b"/".join(parts[: number + 1]) + b"/"
    return path if _DIGEST.search(parts[-1]) else b"/".join(parts[:-1]) + b"/"


def is_keyed(unit: bytes) -> bool:
    """Return whether the unit's name is a digest, so that any node's content for it is as good."""
    return bool(_DIGEST.search(unit.rstrip(b"/").rpartition(b"/")[2]))


def by_unit(paths: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """Return the paths of each unit."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for path in paths:
        found[unit_of(path)].append(path)
    return dict(found)


def new_units(
    here: Mapping[bytes, CacheFile], there: Mapping[bytes, int], *, with_changed: bool
) -> dict[bytes, list[bytes]]:
    """Return the units in `here` that a generation lacks. `there` has its paths and sizes.

    With `with_changed`, also units without a digest in their name whose files or sizes differ. A
    difference in content alone does not count, since compilers produce different bytes on each
    node.
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


def of_start(
    here: Mapping[bytes, CacheFile], there: Mapping[bytes, int], begun_ns: int
) -> set[bytes]:
    """Return the paths that belong to the key, in a folder that others write to, too.

    Those are units whose files were all put there since the start began, and units that are as in
    the generation.
    """
    stored = by_unit(there)
    found: set[bytes] = set()
    for unit, paths in by_unit(here).items():
        sizes = {path: here[path].size_bytes for path in paths}
        if all(here[path].put_ns >= begun_ns for path in paths) or (
            unit in stored and sizes == {path: there[path] for path in stored[unit]}
        ):
            found.update(paths)
    return found


def within(files: Mapping[bytes, CacheFile], limit_bytes: int) -> set[bytes]:
    """Return the paths to keep, with `limit_bytes` in all: whole units, the last used first."""
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
