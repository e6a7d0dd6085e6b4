"""Scripted NameNode, and a scripted replacement of hdfs-native."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import Struct

from bootseer.base.varints import delimited, take_delimited
from testbed.servers.answering import talking
from tests.bootseer.store.hdfs import protobuf as pb

OPEN = pb.blob(1, pb.number(11, 2**27))
"""GetFileInfoResponseProto of a folder: the NameNode takes calls."""


class Call(Struct, frozen=True):
    """Call that a NameNode received."""

    method: str
    request: bytes
    client: bytes
    """Client's identity; a repeated call has the same one."""
    retry_count: int
    user: str


class RaisedError(Exception):
    """Answer of a NameNode in place of a response: a Java class and a message."""


class ClosedError(Exception):
    """Answer of a NameNode that closes the connection."""


def _frame(connection: socket.socket) -> list[bytes]:
    (length,) = struct.unpack(">I", connection.recv(4, socket.MSG_WAITALL))
    data, messages = connection.recv(length, socket.MSG_WAITALL), []
    while data:
        message, end = take_delimited(data, 1 << 20)
        assert message is not None
        messages.append(message)
        data = data[end:]
    return messages


def _text(value: Any) -> str:
    assert isinstance(value, bytes)
    return value.decode()


@contextlib.contextmanager
def scripted(answer: Callable[[Call], bytes], up: threading.Event | None = None) -> Iterator[str]:
    """Yield the address of a NameNode, as HOST:PORT; connections are closed while it is not `up`.

    `answer` returns the response to each call, or raises RaisedError or ClosedError. The question
    whether the NameNode takes calls is answered without it.
    """

    def talk(connection: socket.socket, over: threading.Event) -> None:
        # Some only try whether they can connect.
        begin = connection.recv(7, socket.MSG_WAITALL)
        if not begin or (up is not None and not up.is_set()):
            return
        assert begin == b"hrpc\x09\x00\x00"
        _, context = _frame(connection)
        header, request_header, request = _frame(connection)
        (user_information,), head = pb.fields(context)[2], pb.fields(header)
        assert isinstance(user_information, bytes)
        (client,), (retry,) = head[4], head[5]
        assert isinstance(client, bytes)
        assert isinstance(retry, int)
        call = Call(
            _text(pb.fields(request_header)[1][0]),
            request,
            client,
            retry >> 1,  # of zigzag
            _text(pb.fields(user_information)[1][0]),
        )
        start = pb.number(1, 0) + pb.number(2, 0)
        try:
            is_idempotent = (call.method, request) == ("getFileInfo", pb.text(1, "/"))
            body = delimited(start) + delimited(OPEN if is_idempotent else answer(call))
        except RaisedError as error:
            kind, text = error.args
            raised = pb.number(1, 0) + pb.number(2, 1) + pb.text(4, kind) + pb.text(5, text)
            body = delimited(raised)
        except ClosedError:
            return
        connection.sendall(struct.pack(">I", len(body)) + body)

    with talking(talk) as address:
        yield address


class NativeFile:
    """Replacement of the library's file that is open for reading."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def read_range_stream(self, offset: int, length: int) -> Iterator[bytes]:
        yield self._content[offset : offset + length]


class NativeClient:
    """Methods of hdfs-native's client that tests replace."""

    @property
    def inner(self) -> Any:
        return None

    def get_file_info(self, path: str) -> Any:
        raise NotImplementedError

    def read(self, path: str) -> NativeFile:
        raise NotImplementedError


@contextlib.contextmanager
def replaced_library(
    monkeypatch: pytest.MonkeyPatch, client: NativeClient, options: str = ""
) -> Iterator[str]:
    """Yield the URL of an HDFS whose NameNode takes our calls; `client` replaces hdfs-native's."""
    monkeypatch.setattr("hdfs_native.Client", lambda url, config: client)

    def fail(call: Call) -> bytes:
        raise RaisedError("java.io.IOException", call.method)

    with scripted(fail) as address:
        yield f"hdfs://{address}/x{options}"
