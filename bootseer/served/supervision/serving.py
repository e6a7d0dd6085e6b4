"""Serving a mount whose beginning somebody awaits, and handing it to newer code while it is in use.

Alone owns the document that a process leaves to the one that it becomes (execve): the mount's
/dev/fuse descriptor, what was agreed with the kernel, and what its server adds. Main thread of a
single-threaded process only.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bootseer.base.documents import to_builtins
from bootseer.errors import BootseerError, UnavailableError
from bootseer.fuse.kernel.backing import table_from_text, table_to_text
from bootseer.fuse.kernel.connection import Connection
from bootseer.fuse.kernel.mounting.options import MountOptions
from bootseer.fuse.kernel.operations import Operations
from bootseer.fuse.kernel.server import Attached
from bootseer.served.background import Report, python_environment
from bootseer.served.supervision.supervisor import RestartPolicy, supervise

_log = logging.getLogger(__name__)

RESUME = "--resume"
"""Of a server's module: what follows is the descriptor of the document."""
_IMPORT_S = 60.0


def serve_mount(
    make: Callable[[], Operations],
    directory: Path,
    options: MountOptions,
    report: Report | None,
    *,
    on_ready: Callable[[], None] = lambda: None,
    restart: RestartPolicy | None = None,
    attached: Attached | None = None,
    on_attached: Callable[[Attached], None] | None = None,
    hand_over: Callable[[Attached], None] | None = None,
) -> None:
    """As `supervise`; `report` hears that the mount works, or why no worker could be made.

    Raises: BootseerError; UnavailableError where nobody waits for the mount any more.
    """

    def worker() -> Operations:
        try:
            return make()
        except (BootseerError, OSError) as error:
            if report is not None:
                report.send_error(error)
            raise
        finally:
            if report is not None:
                # A worker's is a copy: the supervisor reports when it serves.
                report.close()

    def ready() -> None:
        if report is not None and not report.send_ready():
            raise UnavailableError(f"nobody waits for the mount on {directory} any more")
        on_ready()

    supervise(
        worker,
        directory,
        options,
        on_ready=ready,
        restart=restart,
        attached=attached,
        on_attached=on_attached,
        hand_over=hand_over,
    )


def become_newer(
    module: str, imports: str, attached: Attached, document: Mapping[str, Any], kept: list[int]
) -> None:
    """Become `module` as it is installed now, which goes on with the mount and finds `document` in
    `taken_over`, and the descriptors `kept` open. Returns, after a warning, where what it `imports`
    cannot be imported."""
    environment = python_environment()
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}, {imports}"],
        env=environment,
        cwd="/",
        capture_output=True,
        timeout=_IMPORT_S,
        check=False,
    )
    if tried.returncode != 0:
        reason = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        _log.error("the code that is installed now does not start, going on as before: %s", reason)
        return
    whole = {
        **document,
        "device": attached.device,
        "device_minor": attached.device_minor,
        "path": os.fspath(attached.path),
        "connection": to_builtins(attached.connection),
        "backing_table": attached.backing_table and table_to_text(attached.backing_table),
    }
    left = os.memfd_create("bootseer-resume")
    with open(left, "w", encoding="utf-8", closefd=False) as file:
        json.dump(whole, file)
    os.lseek(left, 0, os.SEEK_SET)
    for fd in (left, attached.device, *kept):
        os.set_inheritable(fd, True)
    _log.info("going on with the code that is installed now")
    os.execve(sys.executable, [sys.executable, "-m", module, RESUME, str(left)], environment)


def taken_over(left: int) -> tuple[dict[str, Any], Attached]:
    """The document of who this process was before, and the mount. Descriptors that the document
    names `*_fd` are this process's alone again."""
    with open(left, encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    for name, fd in document.items():
        if fd is not None and (name == "device" or name.endswith("_fd")):
            os.set_inheritable(fd, False)
    attached = Attached(
        document["device"],
        document["device_minor"],
        Path(document["path"]),
        Connection(**document["connection"]),
        # A server of an earlier release passed no files.
        table_from_text(table) if (table := document.get("backing_table")) else None,
    )
    return document, attached
