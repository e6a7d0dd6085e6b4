"""The files with figures in `metrics_dir`: one per mount, replaced while it lives, kept a while.

Alone owns the names `bootseer-image-*.prom` there. A launch may be over before it was scraped: its
file stays for an hour after its last change, and later mounts remove it. Unlike everything else of
ours, these files are for all users: they hold names of images and workloads, and numbers. Thread-
safe; several processes at once do no harm.
"""

import contextlib
import logging
import time
from pathlib import Path

from bootseer.prefetch.figures import render
from bootseer.prefetch.launch_figures import LaunchFigures

_log = logging.getLogger(__name__)

_KEPT_S = 3600.0
_PREFIX = "bootseer-image-"


class FiguresFile:
    """One mount's file."""

    def __init__(self, metrics_dir: Path, mount: str) -> None:
        """Nothing is written yet, but what older mounts left is removed."""
        self._path = metrics_dir / f"{_PREFIX}{mount}.prom"
        self._has_failed = False
        _remove_old(metrics_dir)

    def write(self, figures: LaunchFigures) -> None:
        """Replace the file at once. Never raises: one warning when it cannot be written."""
        # The collector reads *.prom only.
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.write_text(render(figures), encoding="utf-8")
            # Whatever the umask: node-exporter is another user.
            temporary.chmod(0o644)
            temporary.rename(self._path)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("cannot write figures to %s: %s", self._path, error)


def _remove_old(metrics_dir: Path) -> None:
    before_s = time.time() - _KEPT_S
    with contextlib.suppress(OSError):
        for path in metrics_dir.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before_s:
                    path.unlink()
