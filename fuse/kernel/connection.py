"""Negotiation of the protocol with the kernel (INIT), as pure functions.

Works with Linux 5.4 (7.31) to 6.18 (7.45): features that the kernel does not offer are not asked
for, and `ConnectionFeatures` lists the agreed ones.
"""

from msgspec import Struct

from bootseer.errors import CorruptError, UnsupportedError
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.options import REQUEST_BYTES_MAX, MountOptions

_BACKGROUND_MAX = 64
"""Number of background requests (readahead, asynchronous I/O) that the kernel may have open."""


class InitRequest(Struct, frozen=True):
    """The kernel's opening message."""

    unique: int
    major: int
    minor: int
    max_readahead_bytes: int
    flags: int


class ConnectionFeatures(Struct, frozen=True):
    """Features on which both sides agreed, valid until the file system is unmounted."""

    flags: int
    max_write_bytes: int

    @property
    def passthrough(self) -> bool:
        """Return whether an open may hand a file to the kernel (7.40; needs CAP_SYS_ADMIN)."""
        return bool(self.flags & wire.PASSTHROUGH)

    @property
    def resend(self) -> bool:
        """Return whether NOTIFY_RESEND makes the kernel repeat unanswered requests (7.40)."""
        return bool(self.flags & wire.HAS_RESEND)

    @property
    def times_out(self) -> bool:
        """Return whether the kernel gives up a request that is not answered (7.43)."""
        return bool(self.flags & wire.REQUEST_TIMEOUT)

    @property
    def direct_io_mmap(self) -> bool:
        """Return whether files opened with direct_io can be mapped shared (7.39)."""
        return bool(self.flags & wire.DIRECT_IO_ALLOW_MMAP)


def decode_init(request: bytes | memoryview) -> InitRequest:
    """Decode the kernel's INIT message.

    Raises:
        CorruptError: the message is not INIT, or cut short.
    """
    body = memoryview(request)[wire.IN_HEADER_BYTES :]
    if len(body) < wire.INIT_IN.size:
        raise CorruptError(f"the kernel's first message is only {len(request)} bytes long")
    _, opcode, unique, *_ = wire.IN_HEADER.unpack_from(request)
    if opcode != wire.INIT:
        raise CorruptError(f"the kernel's first message is opcode {opcode}, not INIT")
    major, minor, max_readahead_bytes, flags = wire.INIT_IN.unpack_from(body)
    # Before 7.36 (INIT_EXT) the message ends here; the second word is undefined without the flag.
    if flags & wire.INIT_EXT and len(body) >= wire.INIT_IN.size + wire.INIT_EXT_IN.size:
        flags |= wire.INIT_EXT_IN.unpack_from(body, wire.INIT_IN.size)[0] << 32
    return InitRequest(unique, major, minor, max_readahead_bytes, flags)


def wanted_flags(options: MountOptions) -> int:
    """Return all capabilities that `options` would use if the kernel had them."""
    wanted = (
        wire.ASYNC_READ
        | wire.BIG_WRITES
        | wire.ASYNC_DIO
        | wire.PARALLEL_DIROPS
        | wire.ABORT_ERROR
        | wire.MAX_PAGES
        | wire.CACHE_SYMLINKS
        | wire.INIT_EXT
        | wire.NO_OPEN_SUPPORT
        | wire.NO_OPENDIR_SUPPORT
        | wire.DIRECT_IO_ALLOW_MMAP
        | wire.HAS_RESEND
    )
    # AUTO_INVAL_DATA drops pages whenever a getattr shows another mtime or size;
    # EXPLICIT_INVAL_DATA never does. They exclude each other.
    wanted |= wire.AUTO_INVAL_DATA if options.invalidate_on_change else wire.EXPLICIT_INVAL_DATA
    optional = (
        (options.read_directory_plus, wire.DO_READDIRPLUS | wire.READDIRPLUS_AUTO),
        (options.atomic_truncate, wire.ATOMIC_O_TRUNC),
        (options.passthrough, wire.PASSTHROUGH),
        (options.kernel_deadline_s > 0, wire.REQUEST_TIMEOUT),
    )
    for chosen, flags in optional:
        if chosen:
            wanted |= flags
    return wanted


def negotiate(request: InitRequest, options: MountOptions) -> tuple[ConnectionFeatures, bytes]:
    """Return the agreed features, and the body of the reply (struct fuse_init_out).

    Raises:
        UnsupportedError: the kernel speaks another major version, or one older than 7.31.
    """
    if request.major != wire.KERNEL_MAJOR or request.minor < wire.KERNEL_MINOR_OLDEST:
        raise UnsupportedError(
            f"this kernel speaks FUSE {request.major}.{request.minor}; "
            f"{wire.KERNEL_MAJOR}.{wire.KERNEL_MINOR_OLDEST} (Linux 5.4) or later is needed"
        )
    flags = wanted_flags(options) & request.flags
    if not flags & wire.INIT_EXT:
        flags &= 0xFFFFFFFF
    minor = min(request.minor, wire.KERNEL_MINOR_NEWEST)
    # Without MAX_PAGES a request carries 32 pages (FUSE_DEFAULT_MAX_PAGES_PER_REQ).
    max_pages = REQUEST_BYTES_MAX // wire.PAGE_BYTES if flags & wire.MAX_PAGES else 32
    # Every server thread has a buffer for the largest write.
    wanted_write_bytes = wire.PAGE_BYTES if options.read_only else REQUEST_BYTES_MAX
    max_write_bytes = min(wanted_write_bytes, max_pages * wire.PAGE_BYTES)
    reply = wire.INIT_OUT.pack(
        wire.KERNEL_MAJOR,
        minor,
        # The kernel takes the smaller of this and its own default, so that a small window needs no
        # privilege; a larger one is set through sysfs (`mount.set_readahead`).
        options.max_readahead_bytes,
        flags & 0xFFFFFFFF,
        _BACKGROUND_MAX,
        # Congestion threshold, at which the kernel stops readahead.
        _BACKGROUND_MAX * 3 // 4,
        max_write_bytes,
        1,  # time_gran: timestamps have nanoseconds
        max_pages if flags & wire.MAX_PAGES else 0,
        0,
        flags >> 32,
        # Passthrough needs a stack depth. With 1, the backing file must not lie on a stacking file
        # system, but overlayfs may lie on top of this one.
        1 if flags & wire.PASSTHROUGH else 0,
        options.kernel_deadline_s if flags & wire.REQUEST_TIMEOUT else 0,
    )
    return ConnectionFeatures(flags, max_write_bytes), reply
