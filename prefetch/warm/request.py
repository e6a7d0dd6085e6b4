"""Requests to warm a directory, and the background process that carries one out.

Warming never costs a start more than a warning and a bounded wait. Main thread.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import DocumentFormat
from bootseer.base.redact import public_url
from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from bootseer.linux.private_files import read_private_file
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.warm.reader import DEFAULT_THREAD_COUNT
from bootseer.prefetch.warm.record import WarmRecord, identity_of, key_of, read_record
from bootseer.prefetch.warm.recording import ARM_S
from bootseer.served.processes import WARMER, start
from bootseer.served.ready_socket import add_ready_names, new_ready_name
from bootseer.served.service import is_alive, log_path, services_dir
from bootseer.settings.config import Settings
from bootseer.store import open_store

WINDOW_S = 120.0
"""Duration of the longest record. After it, training reads other files."""

READ_DEADLINE_S = 600.0
"""The longest read-ahead: by then the command has read the rest itself."""

_LOG_BYTES_MAX = 2**20
_OUTCOME: DocumentFormat[dict[str, Any]] = DocumentFormat(type=dict[str, Any], size_max=1 << 16)


class NodePaths(Struct, frozen=True):
    """Paths of one directory and workload on this node."""

    service: Path
    """Folder of the service; its name is the service's identity."""
    outcome: Path
    """File with the current or last outcome, for `bootseer warm --show`."""
    log: Path


class WarmingBegun(Struct, frozen=True):
    """Answer to a `WarmRequest`: the command may start."""

    warning: str = ""
    """Warning for the user; "" for none."""


class WarmRequest(Struct, frozen=True):
    """Request to warm one directory for one workload."""

    directory: str
    """Real path of the directory."""
    identity: str
    workload: str
    store_url: str
    cache_dir: str
    run_dir: str
    deadline_s: float
    always_record: bool = False
    """Record even if there is a record; the union of both is stored."""
    method: str = "auto"
    window_s: float = WINDOW_S
    memory_bytes: int | None = None
    """Bytes that may be read ahead; None: `plan.memory_budget_bytes`."""
    thread_count: int = DEFAULT_THREAD_COUNT
    read_deadline_s: float = READ_DEADLINE_S
    process: ProcessId | None = None
    """Process of the command. Warming ends with it."""
    ready_name: str = ""
    """Name of the socket that `bootseer.ready()` of the command sends to."""

    @property
    def node_paths(self) -> NodePaths:
        """Paths of this directory and workload on this node."""
        _, digest, _ = key_of(self.identity, self.workload).split("/")
        name = f"{digest[:16]}-{self.workload}"
        run_dir = Path(self.run_dir)
        return NodePaths(
            services_dir(run_dir) / f"warm-{name}",
            Path(self.cache_dir) / "warm" / f"{name}.json",
            log_path(run_dir, f"warm-{name}"),
        )


def warm_request(settings: Settings, directory: Path, name: str | None) -> WarmRequest:
    """Return the request for an existing directory.

    Raises: NotFoundError, InvalidInputError, PermissionDeniedError.
    """
    try:
        real = os.path.realpath(directory, strict=True)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot look at {directory}: {error.strerror}") from error
    except OSError as error:
        raise NotFoundError(f"cannot warm {directory}: {error.strerror}") from error
    if not os.path.isdir(real):
        raise InvalidInputError(f"cannot warm {directory}: it is not a directory")
    return WarmRequest(
        directory=real,
        identity=identity_of(real, name),
        workload=settings.workload,
        store_url=settings.store_url,
        cache_dir=str(settings.cache_dir),
        run_dir=str(settings.run_dir),
        deadline_s=settings.deadline_s,
    )


def stored_record(request: WarmRequest) -> WarmRecord:
    """Return the record in the store. Raises: NotFoundError, and as `read_record`."""
    with open_store(request.store_url, deadline_s=request.deadline_s) as store:
        record = read_record(store, request.identity, request.workload)
    if record is None:
        raise NotFoundError(
            f"{public_url(request.store_url)} has no record of {request.directory} for the "
            f"workload {request.workload}; make one with `bootseer warm {request.directory} -- "
            "COMMAND`"
        )
    return record


def read_outcome(path: Path) -> dict[str, Any]:
    """Return the current or last outcome; {} if it is unknown or its file is damaged."""
    return read_private_file(path, _OUTCOME) or {}


def start_warming(request: WarmRequest) -> str:
    """Start recording or reading ahead in the background, for this process.

    Returns once the command may start: a warning for the user, or "". Never raises if warming
    fails. The environment is changed so that `bootseer.ready()` of the command ends a recording.
    """
    request = replace(request, process=ProcessId.of(os.getpid()), ready_name=new_ready_name())
    try:
        warning = _start(request)
    except (BootseerError, OSError) as error:
        return f"{request.directory} is not warmed: {error}"
    add_ready_names(os.environ, request.ready_name)
    return warning


def _start(request: WarmRequest) -> str:
    paths = request.node_paths
    if is_alive(paths.service):
        return ""  # Another rank of this node warms the directory.
    with contextlib.suppress(OSError):
        if paths.log.stat().st_size > _LOG_BYTES_MAX:
            paths.log.unlink()
    with start(WARMER, Path(request.run_dir), identity=paths.log.stem, copy=True) as process:
        try:
            process.tell(request)
            return process.wait(min(request.deadline_s, ARM_S) + 5.0, WarmingBegun).warning
        except DeadlineError:
            # A process that hangs would do so for ever.
            process.kill()
            raise
