"""What several commands on snapshots share: an option, and what they print of one."""

from typing import TYPE_CHECKING, Any

import click

from bootseer.base.shown import shown
from bootseer.cli.output import human_time
from bootseer.settings.config import RESTORE_MODES

if TYPE_CHECKING:
    from bootseer.snapshots.manifest import Manifest


mode_option = click.option(
    "--mode",
    metavar="MODE",
    type=click.Choice(RESTORE_MODES),
    help="How to restore: auto, mount, link or extract. Default: BOOTSEER_RESTORE_MODE.",
)


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
        "created": human_time(manifest.created_ns),
        "created_ns": manifest.created_ns,
        "node": manifest.node,
    }
