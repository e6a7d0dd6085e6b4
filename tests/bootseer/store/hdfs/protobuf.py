"""Protocol buffers by hand: tests have the numbers of fields from Hadoop, and not from us."""

from bootseer.store.hdfs.rpc.protobuf import varint


def number(field: int, value: int) -> bytes:
    """A field that holds an unsigned number."""
    return varint(field << 3) + varint(value)


def blob(field: int, data: bytes) -> bytes:
    """A field that holds bytes, or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def text(field: int, text: str) -> bytes:
    """A field that holds a string."""
    return blob(field, text.encode())
