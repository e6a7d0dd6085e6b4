"""How `bootseer snapshot` shows snapshots: sentences, times, paths, and what they are in JSON."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from bootseer.config import RESTORE_MODES

if TYPE_CHECKING:
    from bootseer.snapshots.manifest import Manifest


mode_option = click.option(
    "--mode",
    metavar="MODE",
    type=click.Choice(RESTORE_MODES),
    help="How to restore: auto, mount, link, extract or hardlink. Default: BOOTSEER_RESTORE_MODE.",
)


def say(sentence: str) -> None:
    """A sentence for people, on stderr."""
    click.echo(f"bootseer: {sentence}", err=True)


def shown(path: bytes) -> str:
    """A path as text; bytes that are no UTF-8 are escaped."""
    return path.decode("utf-8", "backslashreplace")


def when(created_ns: int) -> str:
    """A wall clock's time, in UTC."""
    return datetime.fromtimestamp(created_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def summary(manifest: "Manifest") -> dict[str, Any]:
    """What `create`, `restore` and `list` print of a snapshot."""
    return {
        "fingerprint": manifest.fingerprint,
        "name": manifest.name,
        "targets": [shown(target.path) for target in manifest.targets],
        "file_count": manifest.file_count,
        "content_bytes": manifest.content_bytes,
        "stored_bytes": manifest.stored_bytes,
        "whole_bytes": manifest.whole_bytes,
        "setup_seconds": manifest.setup_ns / 1e9,
        "created": when(manifest.created_ns),
        "created_ns": manifest.created_ns,
        "node": manifest.node,
    }
