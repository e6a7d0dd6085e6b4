"""The frames of Hadoop's RPC, version 9: headers, lengths, and what an answer says. No state."""

import socket
import struct
import time

from bootseer.store.hdfs.rpc import messages
from bootseer.store.hdfs.rpc.protobuf import delimited, take_delimited

FRAME_MAX_BYTES = 1 << 20
# Of an exception: its class, and a message with a stack trace.
_TEXT_MAX_BYTES = 64 << 10


class RpcError(Exception):
    """The NameNode's answer is an exception; the text begins with its Java class."""


class NotHadoopError(ConnectionError):
    """The answer is no frame of Hadoop's RPC: another server has this port."""


def receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    """The next `count` bytes, by the monotonic time `end_s`. Raises: OSError."""
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        left_s = end_s - time.monotonic()
        # Also where a byte comes now and then: an answer has one deadline.
        if left_s <= 0 and len(rest) < count:
            raise TimeoutError("the NameNode's answer does not end")
        connection.settimeout(max(0.01, left_s))
        received = connection.recv_into(rest)
        if not received:
            raise ConnectionError("the NameNode closed the connection")
        rest = rest[received:]
    return bytes(data)


def result_of(answer: bytes) -> bytes:
    """The message that the answer holds. Raises: RpcError, what the NameNode raised."""
    try:
        head, end = _message(answer)
        header = messages.RpcResponseHeader.decode(head)
        if header.status == messages.SUCCESS:
            return _message(answer[end:])[0]
    except ValueError as error:
        raise ConnectionError("the NameNode's answer cannot be understood") from error
    texts = (header.exception, header.text)
    raise RpcError(
        ": ".join(text[:_TEXT_MAX_BYTES].decode("utf-8", "replace") for text in texts if text)
    )


def _message(data: bytes) -> tuple[bytes, int]:
    message, end = take_delimited(data, FRAME_MAX_BYTES)
    if message is None:
        raise ValueError("no message")
    return message, end


def frame(*messages: bytes) -> bytes:
    """What is sent of some messages."""
    body = b"".join(map(delimited, messages))
    return struct.pack(">I", len(body)) + body
