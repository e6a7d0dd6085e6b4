"""The layouts equal those of include/uapi/linux/fuse.h."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.fuse.kernel import wire
from bootseer.fuse.kernel.operations import Attributes, DirectoryEntry, NodeEntry


@pytest.mark.parametrize(
    ("layout", "size_bytes"),
    [
        (wire.IN_HEADER, 40),
        (wire.SETATTR_IN, 88),
        (wire.MKDIR_IN, 8),
        (wire.RENAME2_IN, 16),
        (wire.OPEN_IN, 8),
        (wire.CREATE_IN, 16),
        (wire.RELEASE_IN, 24),
        (wire.FLUSH_IN, 24),
        (wire.READ_IN, 40),
        (wire.WRITE_TAIL_IN, 40),
        (wire.FSYNC_IN, 16),
        (wire.GETXATTR_IN, 8),
        (wire.LSEEK_IN, 24),
        (wire.OUT_HEADER, 16),
        (wire.INIT_OUT, 64),
        (wire.ATTR, 88),
        (wire.ENTRY_OUT, 40),
        (wire.ATTR_OUT, 16),
        (wire.OPEN_OUT, 16),
        (wire.WRITE_OUT, 8),
        (wire.STATFS_OUT, 80),
        (wire.GETXATTR_OUT, 8),
        (wire.LSEEK_OUT, 8),
        (wire.DIRENT, 24),
        (wire.INVAL_INODE_OUT, 24),
        (wire.STORE_OUT, 24),
        (wire.BACKING_MAP, 16),
    ],
)
def test_sizes_are_those_of_the_c_structs(layout: struct.Struct, size_bytes: int) -> None:
    assert layout.size == size_bytes


def test_fast_header_reads_what_the_plain_ones_read() -> None:
    header = wire.IN_HEADER.pack(80, wire.READ, 7, 8, 9, 10, 11, 0, 0)
    request = header + wire.READ_IN.pack(12, 13, 14, 0, 0, 0, 0)
    assert wire.FAST_IN.unpack_from(request) == (80, wire.READ, 7, 8, 9, 10, 11, 12, 13, 14)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_ttl_always_fits_the_wire(ttl_s: float) -> None:
    seconds, nanoseconds = wire.split_ttl(ttl_s)
    assert 0 <= seconds <= 1 << 31
    assert 0 <= nanoseconds < 1_000_000_000
    if 0 < ttl_s < 1 << 31:
        assert math.isclose(seconds + nanoseconds / 1e9, ttl_s, abs_tol=1e-6)


@given(st.integers(-(1 << 62), 1 << 62))
def test_times_before_1970_survive(mtime_ns: int) -> None:
    fields = wire.ATTR.unpack(wire.encode_attributes(Attributes(2, 0o100644, 1, mtime_ns=mtime_ns)))
    assert fields[4] * 1_000_000_000 + fields[7] == mtime_ns


def test_attributes_round_up_to_blocks_unless_told() -> None:
    assert wire.ATTR.unpack(wire.encode_attributes(Attributes(2, 0o100644, 513)))[2] == 2
    sparse = Attributes(2, 0o100644, 513, blocks_512=0)
    assert wire.ATTR.unpack(wire.encode_attributes(sparse))[2] == 0


def test_negative_entry_has_node_0_and_a_ttl() -> None:
    encoded = wire.encode_entry(NodeEntry(None, entry_ttl_s=2.5))
    assert len(encoded) == wire.ENTRY_OUT_BYTES
    assert wire.ENTRY_OUT.unpack_from(encoded) == (0, 0, 2, 0, 500_000_000, 0)


def _directory(names: list[bytes]) -> list[DirectoryEntry]:
    return [
        DirectoryEntry(
            name, number + 2, 0o100644, number + 3, NodeEntry(Attributes(number + 2, 0o100644, 0))
        )
        for number, name in enumerate(names)
    ]


@given(
    st.lists(st.binary(min_size=1, max_size=255), max_size=20),
    st.integers(0, 5000),
    st.booleans(),
)
def test_directory_holds_whole_aligned_records_and_counts_only_those(
    names: list[bytes], size_bytes: int, plus: bool
) -> None:
    encoded, counted = wire.encode_directory(_directory(names), size_bytes, plus)
    assert len(encoded) <= size_bytes
    assert len(encoded) % 8 == 0
    offset, found = 0, []
    while offset < len(encoded):
        offset += wire.ENTRY_OUT_BYTES if plus else 0
        node, cookie, length, kind = wire.DIRENT.unpack_from(encoded, offset)
        start = offset + wire.DIRENT.size
        found.append(encoded[start : start + length])
        assert (node, cookie, kind) == (len(found) + 1, len(found) + 2, 8)
        offset = start + length + -(wire.DIRENT.size + length) % 8
    assert found == names[: len(found)]
    assert counted == ([number + 2 for number in range(len(found))] if plus else [])


def test_setattr_tells_unchanged_from_zero_and_now_from_a_time() -> None:
    valid = wire.FATTR_MODE | wire.FATTR_UID | wire.FATTR_ATIME_NOW | wire.FATTR_MTIME
    body = wire.SETATTR_IN.pack(valid, 0, 5, 6, 0, 1, -2, 3, 4, 5, 6, 0o644, 0, 0, 9, 0)
    changes = wire.decode_setattr(memoryview(body), now_ns=77)
    assert (changes.mode, changes.uid, changes.gid, changes.size_bytes) == (0o644, 0, None, None)
    assert (changes.atime_ns, changes.mtime_ns, changes.handle) == (77, -2_000_000_000 + 5, None)


def test_two_names_may_hold_any_byte_but_nul() -> None:
    assert wire.decode_two_names(memoryview(b"a\xff\0b\n\0")) == (b"a\xff", b"b\n")
