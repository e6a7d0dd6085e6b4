"""Which volumes are published on this node: a file for each, which outlives the driver, and not a
restart of the machine: then nothing is mounted, and the kubelet asks again for those that it needs.

Alone owns these files. A record is written before anything is mounted for its volume and removed
after nothing is: so whatever is mounted has one. Thread-safe.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form
from bootseer.errors import from_oserror
from bootseer.kubernetes.csi.attributes import Volume
from bootseer.linux.private_files import private_directory, read_private_file, write_private_file


class Record(Struct, frozen=True):
    """One published volume."""

    volume_id: str
    target: str
    """Where the pod's containers look for it."""
    volume: Volume
    is_read_only: bool
    behind: str = ""
    """What it shows: a server's mount point, or a tree's digest; empty while that is not known."""
    workload: str = ""
    has_secrets: bool = False
    """It cannot be mounted again without the pod's secrets, which are nowhere kept."""
    device_minor: int = 0
    """Which mount of a server it shows."""


_FORM: Form[Record] = Form(
    type=Record,
    what="a record of a published volume",
    kind="bootseer-volume",
    versions=(1,),
    size_max=256 * 1024,
    kind_member="record",
)


class Records:
    """The records in one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises: BootseerError."""
        self._folder = private_directory(folder)

    def read(self, target: str) -> Record | None:
        """The record of what is published at `target`."""
        return read_private_file(self._path(target), _FORM)

    def write(self, record: Record) -> None:
        """Raises: BootseerError."""
        try:
            write_private_file(self._path(record.target), _FORM.encode(record))
        except OSError as error:
            raise from_oserror(error, f"note the volume at {record.target}") from error

    def remove(self, target: str) -> None:
        """Idempotent. Raises: BootseerError."""
        try:
            self._path(target).unlink(missing_ok=True)
        except OSError as error:
            raise from_oserror(error, f"forget the volume at {target}") from error

    def all(self) -> Iterator[Record]:
        """Every record that can be read."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                record = read_private_file(path, _FORM)
                if record is not None and path == self._path(record.target):
                    yield record

    def _path(self, target: str) -> Path:
        return self._folder / f"{hashlib.sha256(target.encode()).hexdigest()}.json"
