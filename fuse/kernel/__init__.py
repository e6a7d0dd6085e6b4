"""The /dev/fuse protocol in Python: mount, serve, unmount, without a FUSE library.

`Operations` is what a file system implements; `serve`, `supervise` and `Server` mount one.
Other modules of this package are its inside.
"""

from bootseer.fuse.kernel.foreground import serve
from bootseer.fuse.kernel.mounts import Mount, abort, find_mounts, unmount
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.options import MountOptions
from bootseer.fuse.kernel.server import Server
from bootseer.fuse.kernel.supervisor import supervise

__all__ = [
    "Mount",
    "MountOptions",
    "Operations",
    "Server",
    "abort",
    "find_mounts",
    "serve",
    "supervise",
    "unmount",
]
