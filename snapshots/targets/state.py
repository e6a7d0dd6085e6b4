"""What this node knows of its targets: which snapshot each holds, untouched since.

Alone owns the small files in the node's cache that say so. They are only hints: a state counts
only where a fresh scan of the target gives exactly what was recorded, and a missing or damaged
one means no more than that the work is done again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.base.structs import asdict
from bootseer.errors import BootseerError
from bootseer.linux.private_files import write_private_file
from bootseer.settings.config import Settings
from bootseer.snapshots.targets.scan import NOTHING, Scan, scan
from bootseer.snapshots.targets.tree_fingerprint import fingerprint_of_scan

_VERSION = 2
_BYTES_MAX = 64 * 1024


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


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _file(cache_dir: Path, target: Path) -> Path:
    name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return cache_dir / "snapshots" / "state" / f"{name}.json"


def load_state(cache_dir: Path, target: Path, scanned: Scan) -> State | None:
    """What `target` (a host path) holds, or None where it is not known or was touched."""
    state = _read(cache_dir, target)
    if state is None or state.boot_id != _boot_id() or state.exact != fingerprint_of_scan(scanned):
        return None
    return state


def was_empty(cache_dir: Path, target: Path) -> bool:
    """Whether a set-up has made `target` (a host path) whole, as far as this node knows."""
    state = _read(cache_dir, target)
    return state is not None and state.base == NOTHING


def _read(cache_dir: Path, target: Path) -> State | None:
    try:
        with _file(cache_dir, target).open("rb") as file:
            document = json.loads(file.read(_BYTES_MAX))
        if document["version"] != _VERSION:
            return None
        texts = {name: str(document[name]) for name in State.__struct_fields__}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return State(**texts)


def remember(settings: Settings, root: Path) -> Callable[[Path, str, str, str], None]:
    """Returns a function of (target, fingerprint, base, tree fingerprint) that saves the state of
    the target. An empty tree fingerprint stands for that of the tree that is there now.

    It does nothing for a root other than this host's: that one is gone after the job.
    """

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if root == Path("/"):
            present = tree_fingerprint or fingerprint_of_scan(scan(target))
            _save_state(settings.cache_dir, target, State(fingerprint, base, present, _boot_id()))

    return save


def _save_state(cache_dir: Path, target: Path, state: State) -> None:
    """Never raises: it is only a hint."""
    path = _file(cache_dir, target)
    with contextlib.suppress(OSError, BootseerError):
        document = {"version": _VERSION, **asdict(state)}
        write_private_file(path, json.dumps(document).encode("ascii"))
