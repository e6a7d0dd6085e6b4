"""Replacement of a mount's server by newer code while the mount is in use.

Only this module defines the document that a process leaves for the program that replaces it by
execve: the mount's /dev/fuse descriptor, the parameters agreed with the kernel, and members of the
server. Main thread of a single-threaded process only.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.base.documents import from_line, to_builtins, to_line
from bootseer.fuse.kernel.backing import table_from_text, table_to_text
from bootseer.fuse.kernel.connection import ConnectionFeatures
from bootseer.fuse.kernel.server import Attached
from bootseer.linux.scripts import python_environment

_log = logging.getLogger(__name__)

RESUME = "--resume"
"""Option of a server's module; the descriptor of the document follows."""
_IMPORT_S = 60.0


def exec_newer(module: str, imports: str, attached: Attached, document: Mapping[str, Any]) -> None:
    """Replace this process by `module` as it is installed now, which goes on with the mount.

    The new program gets `document` by `read_document`, and the descriptors in its members named
    `*_fd`. Returns, after logging an error, if `module` or `imports` cannot be imported.
    """
    import subprocess  # here: few servers are replaced, and each mount waits for its server

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
        _log.error("the installed code does not start, so the running code serves on: %s", reason)
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
        file.write(to_line(whole))
    os.lseek(left, 0, os.SEEK_SET)
    for fd in (left, *_descriptors(whole)):
        os.set_inheritable(fd, True)
    _log.info("going on with the installed code")
    os.execve(sys.executable, [sys.executable, "-m", module, RESUME, str(left)], environment)


def read_document(left: int) -> tuple[dict[str, Any], Attached]:
    """Return the document of the program that this one has replaced, and the mount."""
    with open(left, encoding="utf-8") as file:
        document = from_line(file.read(), dict[str, Any])
    for fd in _descriptors(document):
        os.set_inheritable(fd, False)
    attached = Attached(
        document["device"],
        document["device_minor"],
        Path(document["path"]),
        ConnectionFeatures(**document["connection"]),
        table_from_text(table) if (table := document.get("backing_table")) else None,
    )
    return document, attached


def _descriptors(document: Mapping[str, Any]) -> list[int]:
    names = [name for name in document if name == "device" or name.endswith("_fd")]
    return [document[name] for name in names if document[name] is not None]
