"""Bytes of the /dev/fuse protocol: constants, struct layouts, and their encoders.

Source: include/uapi/linux/fuse.h (protocol 7.31 of Linux 5.4 to 7.45 of 6.18). Layouts have native
byte order and explicit padding; the comment beside each names the C struct. Pure.
"""

import functools
import math
import mmap
import struct
from collections.abc import Iterable

from bootseer.fuse.kernel.operations import (
    Attributes,
    DirectoryEntry,
    FileSystemStatistics,
    NodeEntry,
    SetAttributes,
)

KERNEL_MAJOR = 7
KERNEL_MINOR_NEWEST = 45
KERNEL_MINOR_OLDEST = 31

# ---- requests -------------------------------------------------------------------------------
IN_HEADER = struct.Struct("=IIQQIIIHH")  # fuse_in_header: len opcode unique nodeid uid gid pid ..
IN_HEADER_BYTES = IN_HEADER.size
# fuse_in_header followed by the common start of fuse_read_in and fuse_write_in: len opcode unique
# nodeid uid gid pid, fh offset size. Every buffer is longer than this, so one unpack works for all
# opcodes; the last three fields are meaningless for other opcodes.
FAST_IN = struct.Struct("=IIQQIII4xQQI")
# fuse_write_in behind its size: write_flags lock_owner flags padding
WRITE_TAIL_IN = struct.Struct("=20xIQI4x")
WRITE_DATA_OFFSET = IN_HEADER_BYTES + 40  # sizeof(struct fuse_write_in) = 40
INIT_IN = struct.Struct("=IIII")  # fuse_init_in: major minor max_readahead flags
INIT_EXT_IN = struct.Struct("=I")  # fuse_init_in.flags2, only with FUSE_INIT_EXT
FORGET_IN = struct.Struct("=Q")  # fuse_forget_in: nlookup
BATCH_FORGET_IN = struct.Struct("=II")  # fuse_batch_forget_in: count dummy
FORGET_ONE = struct.Struct("=QQ")  # fuse_forget_one: nodeid nlookup
GETATTR_IN = struct.Struct("=IIQ")  # fuse_getattr_in: getattr_flags dummy fh
SETATTR_IN = struct.Struct("=IIQQQqqqIIIIIIII")  # fuse_setattr_in
MKDIR_IN = struct.Struct("=II")  # fuse_mkdir_in: mode umask
RENAME_IN = struct.Struct("=Q")  # fuse_rename_in: newdir
RENAME2_IN = struct.Struct("=QII")  # fuse_rename2_in: newdir flags padding
OPEN_IN = struct.Struct("=II")  # fuse_open_in: flags open_flags
CREATE_IN = struct.Struct("=IIII")  # fuse_create_in: flags mode umask open_flags
RELEASE_IN = struct.Struct("=QIIQ")  # fuse_release_in: fh flags release_flags lock_owner
FLUSH_IN = struct.Struct("=QIIQ")  # fuse_flush_in: fh unused padding lock_owner
READ_IN = struct.Struct("=QQIIQII")  # fuse_read_in: fh offset size read_flags lock_owner flags pad
FSYNC_IN = struct.Struct("=QII")  # fuse_fsync_in: fh fsync_flags padding
GETXATTR_IN = struct.Struct("=II")  # fuse_getxattr_in: size padding
INTERRUPT_IN = struct.Struct("=Q")  # fuse_interrupt_in: unique
LSEEK_IN = struct.Struct("=QQII")  # fuse_lseek_in: fh offset whence padding

# ---- replies --------------------------------------------------------------------------------
OUT_HEADER = struct.Struct("=IiQ")  # fuse_out_header: len error unique
OUT_HEADER_BYTES = OUT_HEADER.size
# fuse_init_out: major minor max_readahead flags max_background congestion_threshold max_write
# time_gran max_pages map_alignment flags2 max_stack_depth request_timeout unused[11]
INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")
# fuse_attr: ino size blocks atime mtime ctime atimensec mtimensec ctimensec mode nlink uid gid
# rdev blksize flags
ATTR = struct.Struct("=QQQqqqIIIIIIIIII")
# fuse_entry_out before its fuse_attr: nodeid generation entry_valid attr_valid, and nanoseconds
ENTRY_OUT = struct.Struct("=QQQQII")
ENTRY_OUT_BYTES = ENTRY_OUT.size + ATTR.size
ATTR_OUT = struct.Struct("=QII")  # fuse_attr_out before its fuse_attr: attr_valid nsec dummy
OPEN_OUT = struct.Struct("=QIi")  # fuse_open_out: fh open_flags backing_id
WRITE_OUT = struct.Struct("=II")  # fuse_write_out: size padding
STATFS_OUT = struct.Struct("=QQQQQIIII24x")  # fuse_kstatfs
GETXATTR_OUT = struct.Struct("=II")  # fuse_getxattr_out: size padding
LSEEK_OUT = struct.Struct("=Q")  # fuse_lseek_out: offset
DIRENT = struct.Struct("=QQII")  # fuse_dirent before its name: ino off namelen type

# ---- notifications and ioctls ---------------------------------------------------------------
INVAL_INODE_OUT = struct.Struct("=Qqq")  # fuse_notify_inval_inode_out: ino off len
STORE_OUT = struct.Struct("=QQII")  # fuse_notify_store_out: nodeid offset size padding
NOTIFY_INVAL_INODE = 2
NOTIFY_STORE = 4
NOTIFY_RESEND = 7  # 7.40
BACKING_MAP = struct.Struct("=iIQ")  # fuse_backing_map: fd flags padding
BACKING_ID = struct.Struct("=I")
IOC_BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
IOC_BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32_t)

# enum fuse_opcode
LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 8, 9, 10, 11, 12, 13
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 14, 15, 16, 17, 18, 20
SETXATTR, GETXATTR, LISTXATTR, REMOVEXATTR, FLUSH, INIT = 21, 22, 23, 24, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, ACCESS, CREATE = 27, 28, 29, 30, 34, 35
INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE = 36, 38, 42, 43
READDIRPLUS, RENAME2, LSEEK = 44, 45, 46

# FUSE_* capability flags of INIT, the two words joined
ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
BIG_WRITES = 1 << 5
AUTO_INVAL_DATA = 1 << 12
DO_READDIRPLUS = 1 << 13
READDIRPLUS_AUTO = 1 << 14
ASYNC_DIO = 1 << 15
NO_OPEN_SUPPORT = 1 << 17
PARALLEL_DIROPS = 1 << 18
ABORT_ERROR = 1 << 21
MAX_PAGES = 1 << 22
CACHE_SYMLINKS = 1 << 23
NO_OPENDIR_SUPPORT = 1 << 24
EXPLICIT_INVAL_DATA = 1 << 25
INIT_EXT = 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 36
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39
REQUEST_TIMEOUT = 1 << 42

# fuse_open_out.open_flags
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NOFLUSH = 1 << 5
FOPEN_PARALLEL_DIRECT_WRITES = 1 << 6
FOPEN_PASSTHROUGH = 1 << 7

GETATTR_FH = 1 << 0
FSYNC_DATA_ONLY = 1 << 0
WRITE_LOCKOWNER = 1 << 1  # fuse_write_in.write_flags: lock_owner is set
# fuse_setattr_in.valid
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FATTR_ATIME, FATTR_MTIME, FATTR_FH = 1 << 4, 1 << 5, 1 << 6
FATTR_ATIME_NOW, FATTR_MTIME_NOW, FATTR_LOCKOWNER = 1 << 7, 1 << 8, 1 << 9

PAGE_BYTES = mmap.PAGESIZE
# FUSE_MIN_READ_BUFFER, and room for the largest request with names.
REQUEST_OVERHEAD_BYTES = 64 * 1024
_NS = 1_000_000_000
_TTL_MAX_S = float(1 << 31)
_ATTR_NONE = bytes(ATTR.size)
_ENTRY_NONE = bytes(ENTRY_OUT_BYTES)
DIRENT_ALIGN_BYTES = 8


@functools.lru_cache(maxsize=64)
def split_ttl(ttl_s: float) -> tuple[int, int]:
    """Return whole seconds and nanoseconds; negative and NaN give 0, infinity 68 years."""
    if not ttl_s > 0:
        return 0, 0
    fraction, whole = math.modf(min(ttl_s, _TTL_MAX_S))
    return int(whole), min(int(fraction * _NS), _NS - 1)


def encode_attributes(attributes: Attributes) -> bytes:
    """Encode struct fuse_attr."""
    a = attributes
    blocks = (a.size_bytes + 511) // 512 if a.blocks_512 is None else a.blocks_512
    atime_s, atime_ns = divmod(a.atime_ns, _NS)
    mtime_s, mtime_ns = divmod(a.mtime_ns, _NS)
    ctime_s, ctime_ns = divmod(a.ctime_ns, _NS)
    return ATTR.pack(
        a.inode or a.node,
        a.size_bytes,
        blocks,
        atime_s,
        mtime_s,
        ctime_s,
        atime_ns,
        mtime_ns,
        ctime_ns,
        a.mode,
        a.link_count,
        a.uid,
        a.gid,
        a.rdev,
        a.block_size_bytes,
        0,
    )


def encode_attr_out(attributes: Attributes, ttl_s: float) -> bytes:
    """Encode struct fuse_attr_out."""
    seconds, nanoseconds = split_ttl(ttl_s)
    return ATTR_OUT.pack(seconds, nanoseconds, 0) + encode_attributes(attributes)


def encode_entry(entry: NodeEntry) -> bytes:
    """Encode struct fuse_entry_out; node 0 for a negative entry."""
    entry_s, entry_ns = split_ttl(entry.entry_ttl_s)
    attributes = entry.attributes
    if attributes is None:
        return ENTRY_OUT.pack(0, 0, entry_s, 0, entry_ns, 0) + _ATTR_NONE
    attr_s, attr_ns = split_ttl(entry.attributes_ttl_s)
    head = ENTRY_OUT.pack(attributes.node, 0, entry_s, attr_s, entry_ns, attr_ns)
    return head + encode_attributes(attributes)


def encode_statfs(statistics: FileSystemStatistics) -> bytes:
    """Encode struct fuse_statfs_out."""
    s = statistics
    return STATFS_OUT.pack(
        s.blocks,
        s.blocks_free,
        s.blocks_available,
        s.files,
        s.files_free,
        s.block_size_bytes,
        s.name_max,
        s.block_size_bytes,
        0,
    )


def encode_dirent(entry: DirectoryEntry) -> bytes:
    """Encode struct fuse_dirent with its name, padded to 8 bytes."""
    name = entry.name
    padding = -(DIRENT.size + len(name)) % DIRENT_ALIGN_BYTES
    return (
        DIRENT.pack(entry.node, entry.offset, len(name), (entry.mode >> 12) & 15)
        + name
        + bytes(padding)
    )


def encode_directory(
    entries: Iterable[DirectoryEntry], size_bytes: int, plus: bool
) -> tuple[bytes, list[int]]:
    """Encode the entries that fit into `size_bytes`; return also the nodes that were looked up."""
    parts: list[bytes] = []
    counted: list[int] = []
    used = 0
    for directory_entry in entries:
        record = encode_dirent(directory_entry)
        node = 0
        if plus:
            entry = directory_entry.entry
            if entry is None or entry.attributes is None:
                record = _ENTRY_NONE + record
            else:
                record = encode_entry(entry) + record
                node = entry.attributes.node
        used += len(record)
        if used > size_bytes:
            break
        parts.append(record)
        if node:
            counted.append(node)
    return b"".join(parts), counted


def decode_setattr(body: memoryview, now_ns: int) -> SetAttributes:
    """Decode struct fuse_setattr_in; "set to now" becomes `now_ns`."""
    fields = SETATTR_IN.unpack_from(body)
    (
        valid,
        _,
        handle,
        size_bytes,
        lock_owner,
        atime,
        mtime,
        _,
        atime_ns,
        mtime_ns,
        _,
        mode,
        _,
        uid,
        gid,
        _,
    ) = fields

    def changed_time_ns(bit: int, now_bit: int, seconds: int, nanoseconds: int) -> int | None:
        if valid & now_bit:
            return now_ns
        return seconds * _NS + nanoseconds if valid & bit else None

    return SetAttributes(
        mode=mode if valid & FATTR_MODE else None,
        uid=uid if valid & FATTR_UID else None,
        gid=gid if valid & FATTR_GID else None,
        size_bytes=size_bytes if valid & FATTR_SIZE else None,
        atime_ns=changed_time_ns(FATTR_ATIME, FATTR_ATIME_NOW, atime, atime_ns),
        mtime_ns=changed_time_ns(FATTR_MTIME, FATTR_MTIME_NOW, mtime, mtime_ns),
        handle=handle if valid & FATTR_FH else None,
        lock_owner=lock_owner if valid & FATTR_LOCKOWNER else None,
    )


def decode_name(body: memoryview) -> bytes:
    """Decode the NUL-terminated name that fills `body`."""
    return bytes(body).rstrip(b"\0")


def decode_two_names(body: memoryview) -> tuple[bytes, bytes]:
    """Decode two NUL-terminated names, one after the other."""
    first, _, rest = bytes(body).partition(b"\0")
    return first, rest.rstrip(b"\0")


def encode_notify(code: int, *parts: bytes | bytearray | memoryview) -> bytes:
    """Encode a notification: fuse_out_header with unique 0 and the code in place of an errno."""
    body = b"".join(parts)
    return OUT_HEADER.pack(OUT_HEADER_BYTES + len(body), code, 0) + body
