"""What the next server process of a mount must know to go on: its nodes and open files.

Owns the form and the growth of the file `journal` in the folder of a mount's server: one JSON
object a line, written before the kernel hears of what it tells. A process that is killed loses
nothing of it: the pages are the kernel's. A line that is cut short, at the end, was never acted
upon. The layouts of open files are kept with them, since their names may mean other generations
later. Not thread-safe: the file system holds its lock around every call.
"""

import base64
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer.base.documents import Form
from bootseer.errors import CorruptError
from bootseer.fuse.striped.layout import decode_layout, encode_layout
from bootseer.fuse.striped.view import FileView
from bootseer.linux.private_files import is_own, private_opener

_log = logging.getLogger(__name__)

VERSION = 1
# It is written anew when it has outgrown what it would hold then, by far.
_SMALL_BYTES = 4 * 2**20
_GROWTH = 4
# One that could not be written is begun anew no sooner than this after that.
RETRY_S = 10.0
_NEW = ".journal-new"

Record = Mapping[str, Any]


class Journal:
    """An open journal.

    What cannot be written ends it: the mount works on, without a successor, until it can be begun
    anew (`is_outgrown`).
    """

    def __init__(self, path: Path, *, retry_s: float = RETRY_S) -> None:
        self._path = path
        self._retry_s = retry_s
        self._fd = -1
        self._bytes = 0
        self._fresh_bytes: int | None = None
        """How long it was when it was started; None while it is being."""
        self._layouts: set[str] = set()
        self._failed_s: float | None = None
        """When it could not be written, by the monotonic clock."""

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """What is added within takes the place of all that was there. Never raises by itself."""
        temporary = self._path.with_suffix(_NEW)
        self.close()
        self._bytes = 0
        self._fresh_bytes = None
        self._layouts.clear()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(temporary, flags, 0o600)
        except OSError as error:
            self._give_up(error)
        self.add({"version": VERSION})
        yield
        self._fresh_bytes = self._bytes
        try:
            if self._fd >= 0:
                temporary.replace(self._path)
        except OSError as error:
            self._give_up(error)

    def add(self, record: Record) -> None:
        """Append one. Never raises."""
        if self._fd < 0:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        left = memoryview(line)
        try:
            # A disk that is nearly full takes a part of it.
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._give_up(error)
        self._bytes += len(line)

    def add_layout(self, view: FileView) -> None:
        """Keep what `view` was opened as, once."""
        if self._fd < 0 or view.layout is None or view.identity in self._layouts:
            return
        self._layouts.add(view.identity)
        data = base64.b64encode(encode_layout(view.layout)).decode()
        self.add({"layout": view.identity, "data": data})

    def add_pinned(self, identity: str, content: bytes) -> None:
        """Keep a file's content, whose name is about to go away under its readers."""
        self.add({"pinned": identity, "data": base64.b64encode(content).decode()})

    @property
    def is_outgrown(self) -> bool:
        """Whether it should be started anew with what still holds."""
        if self._fresh_bytes is None:
            return False
        if self._failed_s is not None:
            return time.monotonic() - self._failed_s >= self._retry_s
        if self._fd < 0:
            return False
        return self._bytes > max(_SMALL_BYTES, _GROWTH * self._fresh_bytes)

    def close(self) -> None:
        """Add no more; what is there stays. Idempotent."""
        self._failed_s = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s: %s; a restarted server will not know what is open", self._path, error)
        self.close()
        self._failed_s = time.monotonic()
        # What it holds is not true any more.
        for path in (self._path, self._path.with_suffix(_NEW)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


_FORM: Form[Record] = Form(type=dict[str, Any], what="a journal", size_max=2**30)


def read_journal(path: Path) -> list[Record]:
    """What a predecessor wrote; nothing where there was none.

    Raises: OSError, CorruptError.
    """
    try:
        with open(path, "rb", opener=private_opener) as file:
            if not is_own(os.fstat(file.fileno())):
                raise CorruptError(f"{path} belongs to another user")
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    records: list[Record] = []
    # What follows the last newline was cut short.
    for line in lines[:-1]:
        records.append(_FORM.decode(line, str(path)))
    if not records or records[0].get("version") != VERSION:
        raise CorruptError(f"{path} is of another version")
    return records[1:]


def view_to_json(view: FileView | None) -> list[Any] | None:
    """A view without its layout, which `add_layout` keeps."""
    if view is None:
        return None
    is_striped = view.layout is not None
    return [view.path, view.identity, view.size_bytes, view.modified_ns, is_striped]


def view_from_json(value: list[Any] | None, layouts: Mapping[str, str]) -> FileView | None:
    """The reverse. Raises: CorruptError, ValueError, KeyError."""
    if value is None:
        return None
    path, identity, size_bytes, modified_ns, is_striped = value
    layout = None
    if is_striped:
        layout = decode_layout(base64.b64decode(layouts[identity]), path)
    return FileView(path, identity, size_bytes, modified_ns, layout)
