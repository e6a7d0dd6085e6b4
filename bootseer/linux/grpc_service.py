"""A gRPC service on Unix sockets, for root alone, until the process is told to end.

Alone knows which status stands for which error. The main thread waits; calls run in threads of the
server. Whoever imports this needs the package grpcio.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    BusyError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.linux.private_files import private_directory
from bootseer.linux.systemd import notify

_log = logging.getLogger(__name__)

_STATUS = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (InvalidInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (BusyError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnsupportedError, grpc.StatusCode.FAILED_PRECONDITION),
    (NoSpaceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (CorruptError, grpc.StatusCode.DATA_LOSS),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineError, grpc.StatusCode.UNAVAILABLE),
)
_THREADS = 16
"""Calls at once. Most of them take a millisecond; those that mount wait for a server."""
_GRACE_S = 10.0
_ASK_S = 5.0
_ADDRESS_BYTES_MAX = 107
_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))

Method = Callable[[Any, grpc.ServicerContext], Any]


def handler_of(
    service: str,
    methods: Mapping[str, tuple[str, str]],
    messages: Mapping[str, Any],
    implementation: Mapping[str, Callable[[Any], Any]],
    streaming: Sequence[str] = (),
) -> grpc.GenericRpcHandler:
    """What a gRPC server needs to offer a service. `methods`: the request and the response of each;
    `streaming`: those that answer with a stream of responses."""
    handlers = {}
    for name, (request, response) in methods.items():
        make = (
            grpc.unary_stream_rpc_method_handler
            if name in streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[name] = make(
            _translated(implementation[name], name),
            request_deserializer=messages[request].FromString,
            response_serializer=messages[response].SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, handlers)


def _translated(method: Callable[[Any], Any], name: str) -> Method:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(request)
        except Exception as error:
            # Each becomes a status: the client would only see that the call failed.
            fitting = (status for kind, status in _STATUS if isinstance(error, kind))
            status = next(fitting, grpc.StatusCode.INTERNAL)
            if status is grpc.StatusCode.UNAVAILABLE:
                _log.warning("%s: %s", name, error)
            elif not isinstance(error, BootseerError):
                _log.exception("%s failed", name)
            context.abort(status, str(error))

    return call


def serve(
    handlers: Sequence[grpc.GenericRpcHandler], addresses: Sequence[Path], start: Callable[[], None]
) -> None:
    """Offer services on the sockets `addresses`, until SIGTERM or SIGINT; `start` is called when
    they are there, and calls are answered once it returns. A socket that is there is replaced.

    Main thread only. Raises: InvalidInputError, UnavailableError, BootseerError.
    """
    paths = [address.absolute() for address in addresses]
    for path in paths:
        if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
            raise InvalidInputError(
                f"the address {path} is too long for a socket; use a shorter one"
            )
    # In every thread that is to be: only `sigwait` gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"), handlers=tuple(handlers)
    )
    for path in paths:
        _bind(server, path)
    start()
    server.start()
    notify("READY=1")
    signal.sigwait(_STOP_SIGNALS)
    notify("STOPPING=1")
    server.stop(_GRACE_S).wait(_GRACE_S + 1)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def ask(address: Path, method: str, request: Any, response: Any) -> Any:
    """One call of the service on a socket: `method` as "/SERVICE/METHOD", its message, and the
    class of the answer. Raises: NotFoundError where it says so, UnavailableError otherwise."""
    with grpc.insecure_channel(f"unix:{address}") as channel:
        caller: Callable[..., Any] = channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return caller(request, timeout=_ASK_S)
        except grpc.RpcError as error:
            is_absent = error.code() is grpc.StatusCode.NOT_FOUND
            kind = NotFoundError if is_absent else UnavailableError
            raise kind(f"{method[1:]} on {address}: {error.details()}") from error


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
