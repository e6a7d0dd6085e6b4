"""Service that warms a directory on this node, and the outcome of its last work.

The process that records or reads ahead holds the folder `run_dir/services/warm-HASH-WORKLOAD`;
other ranks of the node find it held and do nothing. `cache_dir/warm/HASH-WORKLOAD.json` has what it
does, or did last, for `bootseer warm --show`. Any thread.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import DocumentFormat
from bootseer.errors import BootseerError
from bootseer.linux.private_files import read_private_file, write_private_file
from bootseer.linux.processes import ProcessId
from bootseer.prefetch.warm.request import NodePaths, WarmRequest
from bootseer.served.service import WARMING, ServiceState, write_state

_FORM: DocumentFormat[dict[str, Any]] = DocumentFormat(type=dict[str, Any], size_max=1 << 16)


def read_outcome(path: Path) -> dict[str, Any]:
    """Return what was done last; {} if that is unknown or its file is damaged."""
    return read_private_file(path, _FORM) or {}


class Progress:
    """What this process, which holds the service's folder, is doing. Never raises: it informs."""

    def __init__(self, paths: NodePaths, request: WarmRequest) -> None:
        self._paths = paths
        self._workload = request.workload
        self.warning = ""
        self._outcome: dict[str, Any] = {
            "directory": request.directory,
            "workload": request.workload,
            "pid": os.getpid(),
            "command_pid": request.process.pid if request.process else 0,
            "started_ns": time.time_ns(),
            "action": "",
        }
        self.state = ServiceState(
            id=paths.service.name,
            reference="",
            index_digest="",
            workload=request.workload,
            directory=request.directory,
            pid=os.getpid(),
            pid_started=ProcessId.of(os.getpid()).started,
            started_ns=self._outcome["started_ns"],
            purpose=WARMING,
            user=request.process,
        )

    def update(self, **changes: Any) -> None:
        """Replace parts of what `bootseer status` and `--show` tell."""
        self._outcome |= {**changes, "warning": self.warning}
        what = f"{self._workload} ({self._outcome['action']})"
        self.state = replace(self.state, reference=what, problem=self.warning)
        with contextlib.suppress(OSError, BootseerError):
            write_private_file(self._paths.outcome, json.dumps(self._outcome).encode("ascii"))
            write_state(self._paths.service, self.state)
