"""What stands behind volumes of checkpoints: one server for each source and its options, shared by
all pods of the node that name them alike.

Alone mounts, watches and ends these servers. The caller holds the lock of a folder. Thread-safe.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.base.redact import public_url
from bootseer.errors import (
    BusyError,
    CorruptError,
    NotFoundError,
    UnavailableError,
)
from bootseer.fuse.striped.mounted.mount import (
    make_mount_point,
    mount_checkpoints,
    mount_spec,
    unchecked_spec,
    unmount_checkpoints,
)
from bootseer.fuse.striped.mounted.options import parse_options
from bootseer.kubernetes.csi.attributes import CheckpointVolume, server_variables
from bootseer.linux import mount_table
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.served.status import find_known
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 45.0
"""What a server gives open files at the end of the node's servers: less than the spawner waits."""
_UNWRITTEN_S = 10.0
"""So long an unpublished volume's files may still be on their way; then the kubelet asks again."""
_LOOK_S = 0.1
_SALT_BYTES = 32


class Checkpoints:
    """The checkpoint folders that are mounted below one folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Raises: BootseerError."""
        self._settings = settings
        self._folder = private_directory(folder)
        self._salt = _kept_salt(folder / "salt")

    def directory_of(self, volume: CheckpointVolume, secrets: Mapping[str, str]) -> Path:
        """Where the server of such volumes mounts: one for each source, options and secrets.

        Raises: InvalidInputError.
        """
        spec = replace(unchecked_spec(self._settings, volume.source, Path("/"), **_choices(volume)))
        key = hashlib.blake2b(to_line(spec).encode(), key=self._salt, digest_size=12)
        for name, text in sorted(secrets.items()):
            key.update(f"\0{name}\0{text}".encode())
        return self._folder / key.hexdigest()

    def mount(self, volume: CheckpointVolume, directory: Path, secrets: Mapping[str, str]) -> int:
        """Have a server at `directory`; which mount it is. Raises: BootseerError."""
        minor = self.minor(directory)
        if minor is not None:
            return minor
        make_mount_point(self._settings.run_dir, directory)
        spec = mount_spec(self._settings, volume.source, directory, **_choices(volume))
        mount_checkpoints(spec, server_variables(secrets, os.environ))
        minor = self.minor(directory)
        if minor is None:
            raise UnavailableError(f"the mount of {public_url(volume.source)} has just gone")
        return minor

    def minor(self, directory: Path) -> int | None:
        """Which mount is served at `directory`; None where none is, or its server is gone."""
        known = find_known(self._settings.run_dir, directory)
        if known is None or not known.is_running:
            return None
        mount = mount_table.find_mount(directory)
        return mount.device_minor if mount is not None else None

    def await_written(self, directory: Path, *, is_shared: bool) -> None:
        """Until what was being written when this was called is stored, or given up by its writer.

        What a program has closed is stored already, and nothing is kept of what a killed one had
        open. With `is_shared` other pods may go on writing for as long as they like, and the server
        stays for them. Raises: UnavailableError, which names what is not stored; DeadlineError.
        """
        deadline_s = time.monotonic() + _UNWRITTEN_S
        left: set[str] | None = None
        while True:
            status = self._status(directory)
            if status is None:
                return
            unfinished = set(status["unfinished"])
            left = unfinished if left is None else left & unfinished
            if not left:
                return
            if time.monotonic() > deadline_s:
                if is_shared:
                    return
                names = ", ".join(sorted(left)[:3])
                raise UnavailableError(
                    f"{len(left)} files of the checkpoint folder {status['url']} are still being "
                    f"written: {names}"
                )
            time.sleep(_LOOK_S)

    def _status(self, directory: Path) -> dict[str, Any] | None:
        known = find_known(self._settings.run_dir, directory)
        if known is None or not known.is_running:
            return None
        try:
            return known.ask("status")
        except UnavailableError:
            # One worker has followed another, or all are gone: their writers were told.
            if self.minor(directory) is None:
                return None
            raise

    def unmount(self, directory: Path) -> None:
        """End the server that no volume uses. Raises: BusyError while something is being written;
        CorruptError, once, where that was lost; BootseerError."""
        status = self._status(directory)
        if status is not None and status["unfinished"]:
            raise BusyError(f"{status['unfinished'][0]} of {status['url']} is being written")
        try:
            unwritten = unmount_checkpoints(self._settings.run_dir, directory)
        except NotFoundError:
            unwritten = ()
        try:
            directory.rmdir()
        except OSError as error:
            _log.warning("cannot remove %s: %s", directory, error)
        if unwritten:
            raise CorruptError(
                f"{len(unwritten)} files were still being written when the last volume went, and "
                f"nothing of them is kept: {', '.join(unwritten[:3])}"
            )

    def unused(self, used: set[Path]) -> list[Path]:
        """The folders of servers that no volume uses."""
        return [path for path in self._folder.iterdir() if path.is_dir() and path not in used]


def _choices(volume: CheckpointVolume) -> dict[str, Any]:
    """The fields of `MountSpec`. Raises: InvalidInputError."""
    choices, _ = parse_options(volume.options)
    return {
        "allow_other": True,
        # Pods run as any user; where owners are not chosen, who reaches the volume may write.
        "everyone_writes": not {"uid", "gid", "umask"} & choices.keys(),
        "shutdown_s": _SHUTDOWN_S,
        **choices,
    }


def _kept_salt(path: Path) -> bytes:
    """Secrets do not show in names of folders. Raises: BootseerError, OSError."""
    try:
        salt = path.read_bytes()
        if len(salt) == _SALT_BYTES:
            return salt
    except FileNotFoundError:
        pass
    salt = os.urandom(_SALT_BYTES)
    write_private_file(path, salt)
    return salt
