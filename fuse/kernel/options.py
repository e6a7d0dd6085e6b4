"""Options of a mount: immutable values, checked when they are made."""

from msgspec import Struct

from bootseer.errors import InvalidInputError

_MIB = 1024 * 1024
REQUEST_BYTES_MAX = _MIB
"""Largest read and write."""
KERNEL_DEADLINE_MAX_S = 0xFFFF


class MountOptions(Struct, frozen=True, kw_only=True):
    """Options of mounting and serving.

    Features that the kernel does not offer are left out; `ConnectionFeatures` lists the others.
    """

    name: str = "bootseer"
    """Name of the device that mount(8) and df show."""
    subtype: str = "bootseer"
    """The file system type becomes `fuse.<subtype>`, which `find_mounts` searches for."""
    allow_other: bool = False
    """Whether other users may access the mount; without root, /etc/fuse.conf must allow it."""
    default_permissions: bool = True
    """The kernel checks permissions by mode, uid and gid."""
    read_only: bool = False
    max_readahead_bytes: int = 128 * 1024
    """Values above the kernel's default of 128 KiB take effect only for root."""
    threads: int = 8
    passthrough: bool = False
    """Negotiate passthrough, so that `Opened.passthrough_fd` takes effect (root, Linux 6.9+)."""
    read_directory_plus: bool = True
    invalidate_on_change: bool = True
    """Drop a file's pages when its size or mtime changes. False for trees that never change:
    pages then live until memory is short or `notify_inval_inode`."""
    atomic_truncate: bool = False
    """Pass O_TRUNC to `open`; otherwise the kernel sends a setattr of size 0 after the open."""
    request_deadline_s: float | None = None
    """Age at which a request is answered ETIMEDOUT, although its operation goes on."""
    kernel_deadline_s: int = 0
    """Age of a request at which the kernel aborts the connection, even if this process is dead; 0:
    never. Linux 6.14 and later check it every 15 seconds. Required for storing pages
    (`Operations.store_pages`)."""
    worker_silence_s: float = 15.0
    """A supervised worker that does not answer its supervisor for this time is replaced; a worker
    that waits for its storage still answers."""
    shutdown_s: float = 10.0
    """Time for which a stopping server waits for open files before it aborts the connection."""

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("subtype", self.subtype)):
            # mount(2) and fusermount3 parse these in one comma-separated string.
            if not text or any(c in text for c in ",\\\0\n") or not text.isprintable():
                raise InvalidInputError(
                    f"mount {what} {text!r}: use printable text without commas and backslashes"
                )
        if "." in self.subtype or "/" in self.subtype or " " in self.subtype:
            raise InvalidInputError(f"mount subtype {self.subtype!r}: use letters, digits, dashes")
        bounds = (
            ("max_readahead_bytes", self.max_readahead_bytes, 0, 256 * _MIB),
            ("threads", self.threads, 1, 256),
            ("kernel_deadline_s", self.kernel_deadline_s, 0, KERNEL_DEADLINE_MAX_S),
        )
        for what, value, low, high in bounds:
            if not low <= value <= high:
                raise InvalidInputError(f"mount option {what}={value}: use {low} to {high}")
