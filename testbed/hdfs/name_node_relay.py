"""`NameNodeRelay`: forwards connections to a NameNode, and falls silent on command."""

import contextlib
import socket
import threading

from bootseer.base.closing import Closing


class NameNodeRelay(Closing):
    """Forwards connections to a port of this machine; `address` is the relay's own."""

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._silent = threading.Event()
        self._sockets = [self._server]
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def fall_silent(self) -> None:
        """From now on take connections and data without an answer, as a host that hangs."""
        self._silent.set()

    def close(self) -> None:
        """Stop the relay. Idempotent."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(self._upstream, 20)
                upstream.settimeout(None)
                self._sockets += [client, upstream]
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._silent.is_set():
                    target.sendall(data)
            if not self._silent.is_set():
                target.shutdown(socket.SHUT_WR)
