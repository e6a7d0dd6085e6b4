"""Striped checkpoints for programs, without a mount: docs/checkpoints.md.

    from bootseer.checkpoints import open_checkpoints, read_into

    with open_checkpoints("hdfs://namenode/checkpoints") as storage:
        read_into(storage, "step-1000/weights.bin", tensor.numpy())

The same files are reached through `bootseer checkpoint mount` and, wherever fsspec URLs are taken,
as `bootseer::hdfs://namenode/checkpoints/...`. All names here may be used from any thread.
"""

from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
from bootseer.fuse.striped.storage import StripedStorage
from bootseer.fuse.striped.stripe_settings import LayoutKind
from bootseer.fuse.striped.tools.copy import (
    copy_across,
    copy_in,
    copy_out,
    open_storage,
    read_into,
)
from bootseer.settings.config import load_config

__all__ = [
    "StripedStorage",
    "copy_across",
    "copy_in",
    "copy_out",
    "open_checkpoints",
    "read_into",
]


def open_checkpoints(
    url: str,
    *,
    stripe_unit_bytes: int = DEFAULT_STRIPE_UNIT_BYTES,
    stripe_count: int = DEFAULT_STRIPE_COUNT,
    layout: LayoutKind = "striped",
) -> StripedStorage:
    """The striped tree at `url`: close it, or use it as a context manager.

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
