"""State of warming on this node: `run_dir/warm/HASH-WORKLOAD.{json,lock}`.

The process that records or reads ahead holds the lock; other ranks of the node find it locked and
do nothing. Any thread.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.linux.locks import lock_file
from bootseer.linux.private_files import private_directory, read_private_file, write_private_file
from bootseer.prefetch.warm.record import key_of
from bootseer.served.service import log_path

_STATE_FORM: DocumentFormat[dict[str, Any]] = DocumentFormat(type=dict[str, Any], size_max=1 << 16)


class NodePaths(Struct, frozen=True):
    """Paths of the files of one directory and workload on this node."""

    state: Path
    lock: Path
    log: Path


def node_paths(run_dir: Path, identity: str, workload: str) -> NodePaths:
    """Make the folder, and return the paths in it. Raises: BootseerError."""
    folder = run_dir / "warm"
    private_directory(folder)
    _, digest, _ = key_of(identity, workload).split("/")
    name = f"{digest[:16]}-{workload}"
    return NodePaths(folder / f"{name}.json", folder / f"{name}.lock", _log_of(run_dir, name))


def _log_of(run_dir: Path, name: str) -> Path:
    return log_path(run_dir, f"warm-{name}")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state in one step. Never raises: the state only informs users."""
    with contextlib.suppress(OSError):
        write_private_file(path, json.dumps(state).encode("ascii"))


def read_state(path: Path) -> dict[str, Any]:
    """Return the last state; {} if there is none or it is damaged."""
    return read_private_file(path, _STATE_FORM) or {}


def running_states(run_dir: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the state and the log of each process that warms now."""
    for path in sorted((run_dir / "warm").glob("*.json")):
        if not path.with_suffix(".lock").exists():
            continue
        try:
            os.close(lock_file(path.with_suffix(".lock"), 0))
        except TimeoutError:
            if state := read_state(path):
                yield state, _log_of(run_dir, path.stem)
        except OSError:
            continue
