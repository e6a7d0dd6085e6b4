"""The frames of Hadoop's RPC, version 9: headers, lengths, and what an answer says. No state."""

import socket
import struct
import time

from bootseer.store import hdfs_protobuf as pb

FRAME_MAX_BYTES = 1 << 20
# Of RpcRequestHeaderProto: protocol buffers, "final packet" (an ordinary call).
_RPC_KIND, _RPC_OPERATION = 2, 0
_SUCCESS = 0


class RpcError(Exception):
    """The NameNode's answer is an exception; the text begins with its Java class."""


def receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    """The next `count` bytes, by the monotonic time `end_s`. Raises: OSError."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the NameNode closed the connection")
        data += piece
    return data


def result_of(answer: bytes) -> bytes:
    """The message that the answer holds. Raises: RpcError, what the NameNode raised."""
    try:
        head, end = _message(answer)
        status = [value for field, value in pb.fields(head) if field == 2 and value != _SUCCESS]
        if not status:
            return _message(answer[end:])[0]
        texts = pb.every(head, 4) + pb.every(head, 5)
    except (IndexError, ValueError) as error:
        raise ConnectionError("the NameNode's answer cannot be understood") from error
    raise RpcError(": ".join(text.decode("utf-8", "replace") for text in texts))


def _message(data: bytes) -> tuple[bytes, int]:
    message, end = pb.delimited(data, FRAME_MAX_BYTES)
    if message is None:
        raise ValueError("no message")
    return message, end


def header(call_id: int, client: bytes, retry_count: int) -> bytes:
    """RpcRequestHeaderProto."""
    return (
        pb.number(1, _RPC_KIND)
        + pb.number(2, _RPC_OPERATION)
        + pb.signed(3, call_id)
        + pb.blob(4, client)
        + pb.signed(5, retry_count)
    )


def frame(*messages: bytes) -> bytes:
    """What is sent of some messages."""
    body = b"".join(pb.varint(len(message)) + message for message in messages)
    return struct.pack(">I", len(body)) + body
