"""Negotiation with kernels from 5.4 to 6.18, from the bytes that they send."""

import struct

import pytest

from bootseer.errors import CorruptError, UnsupportedError
from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.connection import ConnectionFeatures, decode_init, negotiate
from bootseer.fuse.kernel.options import MountOptions

# Offers of kernels: fuse_send_init, the counterpart of process_init_reply, in fs/fuse/inode.c.
_FLAGS_5_4 = 0x03FFFFFB
_FLAGS_5_15 = 0x3FFFFFFB & ~(1 << 26 | 1 << 27)
_FLAGS_6_1 = 0x73FFFFFB
_FLAGS2_6_1 = 1 << 0
_FLAGS2_6_6 = 1 << 0 | 1 << 3 | 1 << 4
_FLAGS_6_18 = 0x5FD73FFFFFB


def _message(minor: int, flags: int, flags2: int | None, major: int = 7) -> bytes:
    body = struct.pack("=IIII", major, minor, 131072, flags)
    if flags2 is not None:
        body += struct.pack("=I44x", flags2)
    header = wire.IN_HEADER.pack(40 + len(body), wire.INIT, 2, 0, 0, 0, 0, 0, 0)
    return header + body


def _agree(
    minor: int, flags: int, flags2: int | None, options: MountOptions | None = None
) -> tuple[ConnectionFeatures, tuple[int, ...]]:
    request = decode_init(_message(minor, flags, flags2))
    connection, reply = negotiate(request, options or MountOptions(passthrough=True))
    return connection, wire.INIT_OUT.unpack(reply)


def test_linux_5_4_gets_large_requests_and_nothing_newer() -> None:
    connection, reply = _agree(31, _FLAGS_5_4, None)
    assert reply[:2] == (7, 31)
    assert (reply[8], connection.max_write_bytes) == (256, 1 << 20)
    assert connection.flags & wire.PARALLEL_DIROPS
    assert connection.flags & wire.CACHE_SYMLINKS
    assert not connection.flags >> 30
    assert (connection.passthrough, connection.resend) == (False, False)
    assert reply[10:] == (0, 0, 0), "flags2, stack depth and timeout stay 0"


def test_linux_5_15_has_no_second_word() -> None:
    connection, reply = _agree(34, _FLAGS_5_15, None)
    assert reply[1] == 34
    assert not connection.direct_io_mmap


def test_linux_6_1_second_word_counts_only_with_init_ext() -> None:
    connection, _ = _agree(37, _FLAGS_6_1, _FLAGS2_6_1)
    assert connection.flags & wire.INIT_EXT
    assert not connection.direct_io_mmap
    garbage, _ = _agree(37, _FLAGS_6_1 & ~wire.INIT_EXT, 0xFFFFFFFF)
    assert not garbage.flags >> 32
    assert not garbage.passthrough


def test_linux_6_6_maps_direct_io_files() -> None:
    connection, _ = _agree(39, _FLAGS_6_1, _FLAGS2_6_6)
    assert connection.direct_io_mmap
    assert not connection.passthrough


def test_linux_6_18_takes_all() -> None:
    connection, reply = _agree(45, _FLAGS_6_18 & 0xFFFFFFFF, _FLAGS_6_18 >> 32)
    assert (connection.passthrough, connection.resend) == (True, True)
    assert connection.direct_io_mmap
    assert reply[11] == 1, "passthrough is refused without a stack depth"
    assert connection.flags == reply[3] | reply[10] << 32
    assert not connection.flags & 1 << 20, "POSIX_ACL"


def test_linux_6_18_gives_up_requests_where_it_is_told_to() -> None:
    flags, flags2 = _FLAGS_6_18 & 0xFFFFFFFF, _FLAGS_6_18 >> 32
    connection, reply = _agree(45, flags, flags2, MountOptions(kernel_deadline_s=600))
    assert (connection.times_out, reply[12]) == (True, 600)
    connection, reply = _agree(45, flags, flags2)
    assert (connection.times_out, reply[12]) == (False, 0)
    connection, reply = _agree(39, _FLAGS_6_1, _FLAGS2_6_6, MountOptions(kernel_deadline_s=600))
    assert (connection.times_out, reply[12]) == (False, 0)


def test_a_later_kernel_is_answered_in_our_version() -> None:
    _, reply = _agree(99, 0xFFFFFFFF, 0xFFFFFFFF)
    assert reply[:2] == (7, wire.KERNEL_MINOR_NEWEST)


@pytest.mark.parametrize(("major", "minor"), [(7, 30), (6, 40), (8, 0)])
def test_other_versions_are_refused_by_name(major: int, minor: int) -> None:
    request = decode_init(_message(minor, 0, None, major))
    with pytest.raises(UnsupportedError, match=f"{major}.{minor}"):
        negotiate(request, MountOptions())


def test_without_max_pages_a_request_has_32_pages() -> None:
    connection, reply = _agree(31, _FLAGS_5_4 & ~wire.MAX_PAGES, None)
    assert connection.max_write_bytes == 32 * wire.PAGE_BYTES
    assert reply[8] == 0


def test_options_choose_how_pages_are_invalidated() -> None:
    for invalidate in (True, False):
        options = MountOptions(invalidate_on_change=invalidate)
        connection, _ = _agree(45, _FLAGS_6_18 & 0xFFFFFFFF, _FLAGS_6_18 >> 32, options)
        assert bool(connection.flags & wire.AUTO_INVAL_DATA) is invalidate
        assert bool(connection.flags & wire.EXPLICIT_INVAL_DATA) is not invalidate
        assert not connection.passthrough


@pytest.mark.parametrize("length", [0, 39, 40, 55])
def test_short_messages_are_refused(length: int) -> None:
    with pytest.raises(CorruptError):
        decode_init(_message(45, 0, 0)[:length])


def test_another_first_message_is_refused() -> None:
    message = wire.IN_HEADER.pack(56, wire.LOOKUP, 2, 0, 0, 0, 0, 0, 0) + bytes(16)
    with pytest.raises(CorruptError, match="opcode 1"):
        decode_init(message)
