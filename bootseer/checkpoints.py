"""Striped checkpoints for programs, without a mount: docs/checkpoints.md.

    from bootseer.checkpoints import open_checkpoints, read_into, size_of

    with open_checkpoints("hdfs://namenode/checkpoints") as storage:
        buffer = bytearray(size_of(storage, "step-1000/weights.bin"))
        read_into(storage, "step-1000/weights.bin", buffer)

`GroupReader` loads a checkpoint of torch.distributed.checkpoint on all ranks of a group; it imports
torch when it is first used, and not before.

The same files are reached through `bootseer checkpoint mount` and, wherever fsspec URLs are taken,
as `bootseer::hdfs://namenode/checkpoints/...`. All names here may be used from any thread.
"""

from typing import TYPE_CHECKING, Any

from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind
from bootseer.fuse.striped.tools.copy import (
    copy_across,
    copy_in,
    copy_out,
    open_storage,
    read_into,
    size_of,
)
from bootseer.settings.config import load_config

if TYPE_CHECKING:
    from bootseer.fuse.striped.group.reader import GroupReader as GroupReader

# GroupReader is left out, so that a star import does not import torch.
__all__ = [
    "StripedStorage",
    "copy_across",
    "copy_in",
    "copy_out",
    "open_checkpoints",
    "read_into",
    "size_of",
]


def open_checkpoints(
    url: str,
    *,
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
    stripe_count: int = DEFAULT_STRIPE_COUNT,
    layout: LayoutKind = "striped",
) -> StripedStorage:
    """Open the striped tree at `url`. Close it, or use it as a context manager.

    Paths in it are relative to `url`. New files of more than `stripe_unit_bytes` are striped over
    `stripe_count` parts, or with layout "plain" stored as ordinary ones. Memory and deadline are
    those of the settings (`BOOTSEER_MEMORY`, `BOOTSEER_DEADLINE`, bootseer.toml). The server is not
    asked yet. One storage serves all threads and files; after a fork open another.

    Raises: InvalidInputError.
    """
    return open_storage(
        load_config({}).settings,
        url,
        stripe_unit_bytes=stripe_unit_bytes,
        stripe_count=stripe_count,
        layout=layout,
    )


def __getattr__(name: str) -> Any:
    if name == "GroupReader":
        from bootseer.fuse.striped.group.reader import GroupReader

        return GroupReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
