"""What a set-up in a container changed outside its targets, by the upper layer of its root.

Exact and, but for a bound, complete: the layer is read before the command and after it, and what
differs was changed meanwhile, by whomever. As on a host, caches and logs do not count (`outside`),
nor does what every start finds empty. One thread.
"""

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bootseer.errors import BootseerError
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.capture.outside import IGNORED_NAMES, IGNORED_PATHS, caches
from bootseer.snapshots.catalogue.manifest import Outside
from bootseer.snapshots.targets.upper_layer import WHITEOUT, Layers, Written, written

NAMES_MAX = 200_000
_TEMPORARY = (b"/tmp", b"/var/tmp", b"/run", b"/var/run")
_IGNORED = {os.fsencode(name) for name in IGNORED_NAMES}

Writings = Mapping[bytes, Written]
"""What is in the upper layer, by its path below the root."""


class OutsideLayers:
    """Made before the command is run."""

    def __init__(
        self, layers: Layers, environ: Mapping[str, str], directory: str, targets: Iterable[Path]
    ) -> None:
        """`targets` as they lie on this host; the rest as the command sees it."""
        self._layers = layers
        self._ignored = {*_TEMPORARY, *map(os.fsencode, IGNORED_PATHS)}
        for place in caches(environ, directory):
            try:
                path = resolve_in_root(layers.root, os.fsencode(place))
            except (BootseerError, OSError):
                continue
            self._ignored.add(self._inside(path))
        self._ignored.update(map(self._inside, targets))
        self._before, self._is_whole = self._written()

    def changed(self) -> Outside:
        """What has changed since. Never raises: what cannot be read is left out."""
        if not self._is_whole:
            return Outside(is_complete=False)
        after, is_whole = self._written()
        paths = changed_paths(self._before, after, self._lower, is_whole=is_whole)
        return Outside(paths=tuple(sorted(map(os.fsdecode, paths))), is_complete=is_whole)

    def _inside(self, path: Path) -> bytes:
        below = os.fsencode(path.relative_to(self._layers.root.absolute()))
        return b"/" if below == b"." else b"/" + below

    def _written(self) -> tuple[Writings, bool]:
        return written(self._layers.upper, self._is_ignored, names_max=NAMES_MAX)

    def _is_ignored(self, path: bytes) -> bool:
        return (
            b"/" in self._ignored
            or b"/" + path in self._ignored
            or path.rpartition(b"/")[2] in _IGNORED
            or path.endswith((b".pyc", b".log"))
        )

    def _lower(self, path: bytes) -> os.stat_result | None:
        try:
            return os.lstat(os.path.join(os.fsencode(self._layers.lower), path))
        except OSError:
            return None


def changed_paths(
    before: Writings,
    after: Writings,
    lower: Callable[[bytes], os.stat_result | None],
    *,
    is_whole: bool = True,
) -> list[bytes]:
    """Absolute paths of what is new, changed or gone. `lower`: what was there at first.

    A directory is named where it is gone, new and empty, of another mode or owner, or new in
    another's place; what was in it is not named then. `is_whole`: `after` holds everything.
    """
    found = []
    # Below these nothing of the lower layer shows.
    replaced: set[bytes] = set()
    for path, now in after.items():
        is_hidden = path.rpartition(b"/")[0] in replaced
        if stat.S_ISDIR(now.mode) and (is_hidden or now.is_opaque):
            replaced.add(path)
        then = before.get(path)
        if now == then:
            continue
        if not stat.S_ISDIR(now.mode) or _is_news(now, then, None if is_hidden else lower(path)):
            found.append(b"/" + path)
    if is_whole:
        gone = {path for path in before.keys() - after.keys() if before[path] != WHITEOUT}
        found += [b"/" + path for path in gone if path.rpartition(b"/")[0] not in gone]
    return found


def _is_news(now: Written, then: Written | None, lower: os.stat_result | None) -> bool:
    """Whether a directory is worth a word, besides what is in it."""
    if then is not None and then != WHITEOUT:
        return now[:4] != then[:4]
    if lower is None or then is not None:
        # What is in it tells.
        return now.is_empty
    return (
        now.is_opaque
        or not stat.S_ISDIR(lower.st_mode)
        or (now.mode, now.uid, now.gid) != (lower.st_mode, lower.st_uid, lower.st_gid)
    )
