"""The snapshotter's process: one gRPC server on a Unix socket, until it is told to end.

Mounts stay when it ends: their servers are processes of their own. Main thread only.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from bootseer.errors import InvalidInputError, UnavailableError, from_oserror
from bootseer.linux.private_files import private_directory
from bootseer.linux.systemd import notify
from bootseer.prefetch.snapshotter.core import Snapshotter
from bootseer.prefetch.snapshotter.service import handler_of

_THREADS = 16
"""Calls at once. Most of them take a millisecond; those that mount an image wait for its server."""
_GRACE_S = 10.0
_ADDRESS_BYTES_MAX = 107
_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))


def serve(snapshotter: Snapshotter, address: Path, on_ready: Callable[[], None]) -> None:
    """Offer `snapshotter` on the socket `address`, until SIGTERM or SIGINT; `on_ready` is called
    when it answers. A socket that is there is replaced.

    Raises: InvalidInputError, UnavailableError, BootseerError.
    """
    path = address.absolute()
    if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
        raise InvalidInputError(f"the address {path} is too long for a socket; use a shorter one")
    # In every thread that is to be: only `sigwait` gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"),
        handlers=(handler_of(snapshotter),),
    )
    _bind(server, path)
    snapshotter.start()
    server.start()
    notify("READY=1")
    on_ready()
    signal.sigwait(_STOP_SIGNALS)
    notify("STOPPING=1")
    server.stop(_GRACE_S).wait(_GRACE_S + 1)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _bind(server: grpc.Server, path: Path) -> None:
    private_directory(path.parent)
    before = os.umask(0o177)
    try:
        if path.is_socket():
            path.unlink()
        server.add_insecure_port(f"unix:{path}")
        path.chmod(0o600)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {path}: {error}") from error
    except OSError as error:
        raise from_oserror(error, f"listen on {path}") from error
    finally:
        os.umask(before)
