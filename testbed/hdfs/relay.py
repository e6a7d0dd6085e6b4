"""Slow DataNodes without root: a relay before each DataNode limits its rate and counts bytes.

`MiniHdfs(separate_addresses=True)` has DataNode i listen on 127.0.1.(i+1):PORT, while the NameNode
tells clients 127.0.0.1:PORT, where the relay listens. A rate holds for a DataNode and a direction
with all its connections, as a disk's or a network card's does.
"""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

from bootseer.base.closing import Closing
from testbed.waiting import pause

_BUFFER_BYTES = 256 << 10
# Length of the burst that an idle link may send.
_BURST_S = 0.01
_CONNECT_DEADLINE_S = 10


@dataclass(slots=True)
class _Link:
    """Traffic of a DataNode in one direction."""

    bytes_per_s: float | None
    moved_bytes: int = 0
    free_at_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_through(self, count: int) -> None:
        """Count `count` bytes, and return when the rate allows them to have passed."""
        with self.lock:
            self.moved_bytes += count
            if self.bytes_per_s is None:
                return
            now_s = time.monotonic()
            self.free_at_s = max(self.free_at_s, now_s - _BURST_S) + count / self.bytes_per_s
            wait_s = self.free_at_s - now_s
        pause(wait_s)


class Relays(Closing):
    """Relays for the DataNodes of a `MiniHdfs(separate_addresses=True)` with these ports."""

    def __init__(self, datanode_ports: list[int], bytes_per_s: float | None) -> None:
        self._to_client = [_Link(bytes_per_s) for _ in datanode_ports]
        self._to_datanode = [_Link(bytes_per_s) for _ in datanode_ports]
        self._sockets: list[set[socket.socket]] = [set() for _ in datanode_ports]
        self._listeners = [
            socket.create_server(("127.0.0.1", port), backlog=64) for port in datanode_ports
        ]
        for index, port in enumerate(datanode_ports):
            threading.Thread(target=self._accept, args=(index, port), daemon=True).start()

    def read_bytes(self, index: int) -> int:
        """Return the number of bytes that a DataNode sent to clients."""
        return self._to_client[index].moved_bytes

    def written_bytes(self, index: int) -> int:
        """Return the number of bytes that clients sent to a DataNode."""
        return self._to_datanode[index].moved_bytes

    def set_rate(self, index: int, bytes_per_s: float | None) -> None:
        """Change the rate of a DataNode from now on; None removes the limit."""
        for links in (self._to_client, self._to_datanode):
            links[index].bytes_per_s = bytes_per_s

    def cut(self, index: int) -> None:
        """Break all connections of a DataNode; new ones are accepted."""
        for each in list(self._sockets[index]):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop all relays. Idempotent."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        for index in range(len(self._sockets)):
            self.cut(index)

    def _accept(self, index: int, port: int) -> None:
        while True:
            try:
                client, _ = self._listeners[index].accept()
            except OSError:
                return
            target = (f"127.0.1.{index + 1}", port)
            try:
                datanode = socket.create_connection(target, _CONNECT_DEADLINE_S)
            except OSError:
                client.close()
                continue
            datanode.settimeout(None)
            self._sockets[index] |= {client, datanode}
            threading.Thread(
                target=self._serve, args=(index, client, datanode), daemon=True
            ).start()

    def _serve(self, index: int, client: socket.socket, datanode: socket.socket) -> None:
        writes = threading.Thread(
            target=_pump, args=(client, datanode, self._to_datanode[index]), daemon=True
        )
        writes.start()
        _pump(datanode, client, self._to_client[index])
        writes.join()
        for each in (client, datanode):
            self._sockets[index].discard(each)
            each.close()


def _pump(source: socket.socket, target: socket.socket, link: _Link) -> None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            link.pass_through(count)
            target.sendall(buffer[:count])
    # Close only half of the connection: at the end of a block a client stops sending, and still
    # waits for the last acknowledgement.
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RD)
