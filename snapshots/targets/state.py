"""What this node knows of its targets: which snapshot each holds, untouched since.

Alone owns the small files in the node's cache that say so. They are only hints: a state counts
only where a fresh scan of the target gives exactly what was recorded, and a missing or damaged
one means no more than that the work is done again.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.errors import BootseerError
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.linux.processes import boot_id
from bootseer.settings.config import Settings
from bootseer.snapshots.targets.scan import NOTHING, Scan, scan
from bootseer.snapshots.targets.tree_fingerprint import fingerprint_of_scan


class State(Struct, frozen=True):
    """A target as a set-up or a restore left it."""

    fingerprint: str
    """The snapshot that it holds."""
    base: str
    """What was there before (`scan.base_digest`)."""
    exact: str
    """What is there now (`tree_fingerprint.fingerprint_of_scan`)."""
    boot_id: str
    """After a crash of the node files may be shorter than their sizes tell: another boot's state
    is not trusted."""


_FORM: Form[State] = Form(type=State, versions=(2,), size_max=64 * 1024)


def _file(cache_dir: Path, target: Path) -> Path:
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return cache_dir / "snapshots" / "state" / f"{name}.json"


def load_state(cache_dir: Path, target: Path, scanned: Scan) -> State | None:
    """What `target` (a host path) holds, or None where it is not known or was touched."""
    state = read_private_file(_file(cache_dir, target), _FORM)
    if state is None or state.boot_id != boot_id() or state.exact != fingerprint_of_scan(scanned):
        return None
    return state


def was_empty(cache_dir: Path, target: Path) -> bool:
    """Whether a set-up has made `target` (a host path) whole, as far as this node knows."""
    state = read_private_file(_file(cache_dir, target), _FORM)
    return state is not None and state.base == NOTHING


def remember(settings: Settings, root: Path) -> Callable[[Path, str, str, str], None]:
    """Returns a function of (target, fingerprint, base, tree fingerprint) that saves the state of
    the target. An empty tree fingerprint stands for that of the tree that is there now.

    It does nothing for a root other than this host's: that one is gone after the job.
    """

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if root == Path("/"):
            present = tree_fingerprint or fingerprint_of_scan(scan(target))
            _save_state(settings.cache_dir, target, State(fingerprint, base, present, boot_id()))

    return save


def _save_state(cache_dir: Path, target: Path, state: State) -> None:
    """Never raises: it is only a hint."""
    path = _file(cache_dir, target)
    with contextlib.suppress(OSError, BootseerError):
        write_private_file(path, _FORM.encode(state))
