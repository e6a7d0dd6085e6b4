"""Events of a job's processes: lines that they append to the file in the variable EVENTS.

Standard library only, since it runs in the job's processes.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


def note(event: str, *, at_s: float | None = None, **more: Any) -> None:
    """Append one event of this process, with the current time unless `at_s` is given."""
    line = json.dumps({"event": event, "pid": os.getpid(), "s": at_s or time.time(), **more})
    descriptor = os.open(os.environ["EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events so far, without a line that is being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
