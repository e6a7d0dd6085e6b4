"""Who did what when: lines that processes of a job append to the file that EVENTS names.

Standard library alone: it runs in the job's processes.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


def note(event: str, *, at_s: float | None = None, **more: Any) -> None:
    """Append one event of this process: now, or when it was."""
    line = json.dumps({"event": event, "pid": os.getpid(), "s": at_s or time.time(), **more})
    descriptor = os.open(os.environ["EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events so far; a line that is being written is not among them."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
