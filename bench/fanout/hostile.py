"""Hostile member of a job: it has the key, claims to have every chunk, and sends none of them."""

import contextlib
import itertools
import os
import socket
import threading

from bootseer.fanout import protocol
from bootseer.fanout.objects import ChunkList
from bootseer.fanout.plan import Offer
from bootseer.fanout.trees import STORE
from testbed.waiting import pause


def serve_hostile(address: tuple[str, int], number: int, key: bytes, chunks: ChunkList) -> None:
    """Answer from now on, in threads: wrong bytes, silence and drips take turns."""
    server, turns = socket.create_server(address), itertools.count()
    offer = Offer(number, len(chunks.lengths), 0, (STORE,))

    def feed(sock: socket.socket, request: protocol.Request) -> None:
        index, turn = request.count * 2 + request.tree, next(turns) % 3
        data = chunks.encode()
        sock.sendall(protocol.encode_frame(protocol.LIST, len(data), offer) + data)
        length = chunks.lengths[index]
        if turn == 0:
            sock.sendall(protocol.encode_frame(protocol.CHUNK, length, offer) + bytes(length))
        elif turn == 1:
            sock.recv(1)
        else:
            sock.sendall(protocol.encode_frame(protocol.CHUNK, length, offer))
            for _ in range(length):
                sock.sendall(b"x")
                pause(0.2)

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, ValueError, IndexError):
            hello = protocol.decode_hello(_take(sock, protocol.HELLO_BYTES))
            nonce = os.urandom(protocol.NONCE_BYTES)
            sock.sendall(nonce + protocol.proof(key, b"source", hello, nonce))
            _take(sock, protocol.PROOF_BYTES)
            while True:
                request = protocol.decode_request(_take(sock, protocol.REQUEST_BYTES))
                if request.operation == protocol.FEED:
                    return feed(sock, request)
                sock.sendall(protocol.encode_offer(offer))

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _take(sock: socket.socket, length: int) -> bytes:
    data = sock.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionResetError
    return data
