"""TCP servers whose answers are a function of the test."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from testbed.waiting import TIMEOUT_S


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """Yield the address of a server that calls `answer` on its first and only connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            answer(connection)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()
        thread.join()


@contextlib.contextmanager
def talking(talk: Callable[[socket.socket, threading.Event], object]) -> Iterator[str]:
    """Yield HOST:PORT of a server that calls `talk` on each connection.

    The event that `talk` gets is set when the block ends.
    """
    over = threading.Event()
    talks: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            talk(connection, over)

    def serve_all() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                talks.append(threading.Thread(target=one, args=(connection,), daemon=True))
                talks[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        server = threading.Thread(target=serve_all, daemon=True)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        server.join(TIMEOUT_S)
        for thread in talks:
            thread.join(TIMEOUT_S)
