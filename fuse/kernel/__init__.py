"""The /dev/fuse protocol in Python: mount, serve, unmount, without a FUSE library.

`Operations` is what a file system implements. `serve` mounts one in the foreground, `Server` in
threads of this process; `served.supervision` does so in a worker process that is replaced when it
dies:

    class Hello(Operations): ...
    serve(Hello(), Path("/mnt/hello"), MountOptions(name="hello", read_only=True))

Inside: `wire` (bytes), `connection` (what is agreed with the kernel), `mount`, `mounts` and
`control` (mounting, finding, ending), `dispatch`, `lookups` and `backing` (requests to calls),
`session` (threads), `server` and `foreground` (lives).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.fuse.kernel.mounting.foreground import serve
    from bootseer.fuse.kernel.mounting.mounts import Mount, abort, find_mounts, unmount
    from bootseer.fuse.kernel.mounting.options import MountOptions
    from bootseer.fuse.kernel.operations import Operations
    from bootseer.fuse.kernel.server import Server

__all__ = [
    "Mount",
    "MountOptions",
    "Operations",
    "Server",
    "abort",
    "find_mounts",
    "serve",
    "unmount",
]

# Loaded when first used: who looks for a mount need not load a server.
_HOME = {
    **dict.fromkeys(("Mount", "abort", "find_mounts", "unmount"), "mounting.mounts"),
    "MountOptions": "mounting.options",
    "Operations": "operations",
    "Server": "server",
    "serve": "mounting.foreground",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
