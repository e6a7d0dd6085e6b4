"""gRPC server and client on Unix sockets that only root can use.

Only this module maps errors to gRPC status codes. The main thread waits for the stop signal; calls
run in threads of the server. Importing this module needs the package grpcio.
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
from bootseer.linux.processes import notify_systemd

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
"""Number of calls at once. Most take a millisecond; those that mount wait for a server."""
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
    """Return the handler by which a gRPC server offers a service.

    `methods` has the names of each method's request and response, `messages` their classes, and
    `streaming` the methods that return a stream of responses.
    """
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
            # Without a status, the client would learn only that the call failed.
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
    """Offer services on the sockets `addresses` until SIGTERM or SIGINT.

    `start` is called when the sockets exist; calls are answered after it returns. An existing
    socket is replaced. Main thread only. Raises: InvalidInputError, UnavailableError,
    BootseerError.
    """
    paths = [address.absolute() for address in addresses]
    for path in paths:
        if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
            raise InvalidInputError(
                f"the address {path} is too long for a socket; use a shorter one"
            )
    # Blocked in all later threads, too, so that only `sigwait` gets the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"), handlers=tuple(handlers)
    )
    for path in paths:
        _bind(server, path)
    start()
    server.start()
    notify_systemd("READY=1")
    signal.sigwait(_STOP_SIGNALS)
    notify_systemd("STOPPING=1")
    server.stop(_GRACE_S).wait(_GRACE_S + 1)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def ask(address: Path, method: str, request: Any, response: Any) -> Any:
    """Call a method ("/SERVICE/METHOD") of the service on a socket; `response` is a message class.

    Raises: NotFoundError if the service answers NOT_FOUND; UnavailableError for any other failure.
    """
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
