"""Mounts of volumes: target paths, served trees, writable layers and checkpoint servers.

Public: the functions for a target path in the kubelet's folder (`checked_target` ... `usage_of`),
`VolumeTrees` for images and environments, `CheckpointServers` for checkpoint folders.

Pods of a node that use the same tree, or the same checkpoint source with the same options, share
one server. An environment volume can be writable: an overlay whose upper layer is a file system of
the volume's size, in an unlinked file of the node's disk (in memory if there is no loop device).
Its space is free again as soon as nothing is mounted, whatever happens to driver, pod and node.

No function but `usage_of` touches a mounted file system, which may hang. Thread-safe.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import queue
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer.base.documents import to_line
from bootseer.base.redact import public_url
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.fanout.whole_reads import StartDocuments
from bootseer.fuse.kernel.unmount import detach, is_disconnected
from bootseer.fuse.striped.mounted.mount import (
    describe_mount,
    make_mount_point,
    mount_checkpoints,
    mount_spec,
    unmount_checkpoints,
)
from bootseer.fuse.striped.mounted.options import parse_options
from bootseer.kubernetes.csi.attributes import (
    CheckpointVolume,
    EnvironmentVolume,
    ImageVolume,
    Volume,
    server_variables,
)
from bootseer.kubernetes.mount_host import MOUNT_SOURCE
from bootseer.linux import mount_table, namespaces
from bootseer.linux.overlay import mount_layers
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.prefetch.images.find import image_by_name, publish_later, resolve_image
from bootseer.prefetch.index.catalogue import REGISTRY
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.snapshotter.lazy_trees import LazyTrees
from bootseer.prefetch.snapshotter.snapshot import TreeKey
from bootseer.served.service import VOLUME, Service, find_checkpoints
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.catalogue import admit_tree
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.mounting import cache_index, record_name_of
from bootseer.snapshots.scan import text_of
from bootseer.store import open_own_store

_log = logging.getLogger(__name__)

_USAGE_S = 5.0
_TARGET_MODE = 0o750


def checked_target(kubelet_dir: Path, target: str) -> Path:
    """Return the target path of a call.

    Raises: InvalidInputError if the path is not inside the kubelet's folder.
    """
    path = Path(target)
    is_plain = target == str(path) and path.is_absolute() and ".." not in path.parts
    if not is_plain or "\0" in target or len(path.parts) < len(kubelet_dir.parts) + 2:
        raise InvalidInputError(f"the target path {target[:200]!r} is not a kubelet's")
    # A link in the path would lead elsewhere. The target itself may be a mount that hangs.
    if not path.is_relative_to(kubelet_dir) or mount_table.absolute(path) != path:
        raise InvalidInputError(
            f"the target path {target[:200]!r} does not lie in {kubelet_dir}, the kubelet's folder"
        )
    return path


def make_target(target: Path) -> None:
    """Make the directory of a target, unless something is mounted there."""
    if minor_at(target) is not None:
        return
    try:
        target.mkdir(mode=_TARGET_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise from_oserror(error, f"make the target {target}") from error


def minor_at(target: Path) -> int | None:
    """Return the minor device number of the topmost mount on a target, or None."""
    encoded = os.fsencode(target)
    found = [point.device for point in mount_table.mount_points() if point.path == encoded]
    return os.minor(found[-1]) if found else None


def bind(source: Path, target: Path, *, read_only: bool) -> None:
    """Bind the mount `source` to `target`, with nosuid and nodev."""
    flags = namespaces.MS_BIND | namespaces.MS_REMOUNT | namespaces.MS_NOSUID | namespaces.MS_NODEV
    try:
        namespaces.mount(source, target, flags=namespaces.MS_BIND)
        try:
            namespaces.mount(
                "none", target, flags=flags | (namespaces.MS_RDONLY if read_only else 0)
            )
        except OSError:
            namespaces.unmount(target)
            raise
    except OSError as error:
        raise from_oserror(error, f"bind {source} to {target}") from error


def free_target(target: Path) -> None:
    """Unmount everything on a target and remove its directory. Idempotent.

    Raises: BusyError if a process of the node uses the mount; BootseerError.
    """
    while (minor := minor_at(target)) is not None:
        try:
            detach(target, lazy=False)
        except BusyError:
            mount = mount_table.find_mount(target)
            if mount is None or not _is_dead(target):
                raise
            # The server is gone, so the remaining users get only errors.
            detach(target, lazy=True)
        except InvalidInputError:
            if minor_at(target) == minor:
                raise
    try:
        target.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise from_oserror(error, f"remove the target {target}") from error


def _is_dead(target: Path) -> bool:
    try:
        usage_of(target)
    except DeadlineError:
        return False
    except BootseerError as error:
        return is_disconnected(error)
    return False


def usage_of(path: Path) -> os.statvfs_result:
    """Return the file system's size and free space, waiting at most `_USAGE_S`.

    Raises: DeadlineError if the file system does not answer; BootseerError.
    """
    answers: queue.SimpleQueue[os.statvfs_result | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            # Also list: an overlay's root still answers statvfs when its lower layer is gone.
            with os.scandir(path) as entries:
                next(entries, None)
            answers.put(os.statvfs(path))
        except OSError as error:
            answers.put(error)

    # A hanging thread is left behind and ends with the mount.
    threading.Thread(target=ask, name="usage", daemon=True).start()
    try:
        answer = answers.get(timeout=_USAGE_S)
    except queue.Empty:
        raise DeadlineError(f"the volume at {path} did not answer in {_USAGE_S:g} s") from None
    if isinstance(answer, OSError):
        raise from_oserror(answer, f"read the usage of the volume at {path}") from answer
    return answer


# <linux/loop.h>: a free device's number, a device's file and settings in one step (Linux 5.8).
_LOOP_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LOOP_MAJOR = 7
_AUTOCLEAR = 4
# struct loop_config: the file, the size of a block, loop_info64 with its flags, and eight words.
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")
_MKFS_S = 120.0
_LOOP_ATTEMPTS_MAX = 10
_MOUNT_FLAGS = namespaces.MS_NODEV | namespaces.MS_NOSUID


def mount_writable(tree: Path, target: Path, folder: Path, size_bytes: int) -> None:
    """Mount `tree` on `target` with a writable upper layer of `size_bytes` in a file in `folder`.

    Raises: NoSpaceError if the disk is smaller than that; BootseerError.
    """
    try:
        disk = os.statvfs(folder)
        # Without this check, making the file system would fail and the layer would go to memory.
        if size_bytes > disk.f_blocks * disk.f_frsize:
            raise NoSpaceError(
                f"the volume's size is {size_bytes} bytes, and the node's whole disk has less"
            )
        with tempfile.TemporaryDirectory(prefix="upper-", dir=folder) as name:
            scratch = Path(name)
            with _upper_file_system(scratch, size_bytes) as room:
                for part in ("upper", "work"):
                    (room / part).mkdir(mode=0o700)
                status = os.lstat(tree)
                os.chown(room / "upper", status.st_uid, status.st_gid)
                os.chmod(room / "upper", stat.S_IMODE(status.st_mode))
                mount_layers(
                    [tree], room, target, source=MOUNT_SOURCE, flags=_MOUNT_FLAGS, has_renames=True
                )
    except OSError as error:
        raise from_oserror(error, f"make {target} writable") from error


@contextlib.contextmanager
def _upper_file_system(scratch: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a new file system at the yielded path; after the block, only overlays keep it alive."""
    room = scratch / "room"
    room.mkdir(mode=0o700)
    try:
        _mount_on_disk(scratch / "disk", room, size_bytes)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("a pod's writable environment uses memory instead of the disk: %s", error)
        namespaces.mount(MOUNT_SOURCE, room, "tmpfs", _MOUNT_FLAGS, f"mode=700,size={size_bytes}")
    try:
        yield room
    finally:
        # The overlay holds a reference of its own by now.
        namespaces.unmount(room)


def _mount_on_disk(disk: Path, room: Path, size_bytes: int) -> None:
    fd = os.open(disk, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(fd, size_bytes)
        # The content does not survive a crash, so there is no need for a journal.
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(disk)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_MKFS_S,
            check=True,
        )
        loop, device = _attach(fd)
        try:
            namespaces.mount(device, room, "ext4", _MOUNT_FLAGS)
        finally:
            # LO_FLAGS_AUTOCLEAR detaches the device when the file system is unmounted.
            os.close(loop)
    finally:
        os.close(fd)
        disk.unlink()


def _attach(fd: int) -> tuple[int, str]:
    """Attach an open file to a free loop device, and return the device's descriptor and path."""
    with Path("/dev/loop-control").open("rb", buffering=0) as control:
        for _ in range(_LOOP_ATTEMPTS_MAX):
            number = fcntl.ioctl(control, _LOOP_GET_FREE)
            device = f"/dev/loop{number}"
            if not os.path.exists(device):
                # A container's /dev lacks devices that were made after the container began.
                os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, _LOOP_CONFIG.pack(fd, 0, _AUTOCLEAR))
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:
                    raise
                continue  # another process took the device
            return loop, device
    raise UnavailableError("every free loop device was taken by another process")


class VolumeTree:
    """Tree of a volume, whose index is in the node's cache. Release it once it is mounted."""

    def __init__(self, digest: str, name: str, image: FoundImage | None = None) -> None:
        self.digest = digest
        self.name = name
        self.image = image

    @property
    def is_local(self) -> bool:
        """Whether no other node has the tree yet: the image is not published."""
        return self.image is not None and not self.image.is_published

    def release(self) -> None:
        """Allow the cache to drop the tree's index. Idempotent."""
        if self.image is not None:
            self.image.release()


class VolumeTrees:
    """Served trees of image and environment volumes, mounted below one folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._layers = private_directory(folder / "layers")
        private_directory(folder / "trees")
        self._lazy = LazyTrees(settings, folder / "trees", purpose=VOLUME)

    def find(self, settings: Settings, volume: ImageVolume | EnvironmentVolume) -> VolumeTree:
        """Return the tree of a volume; fetch its index if need be.

        `settings`: those of the volume's start.
        """
        if isinstance(volume, EnvironmentVolume):
            return _find_environment(settings, volume)
        if volume.image.startswith(REGISTRY):
            resolved = resolve_image(settings, volume.image)
        else:
            # Resolve only as a name of an indexed image: as a source it could be a node's folder.
            resolved = image_by_name(settings, volume.image, _log.warning)
        return VolumeTree(resolved.record.index_digest, resolved.record.reference, resolved)

    def show(
        self, settings: Settings, key: TreeKey, volume: Volume, tree: VolumeTree, target: Path
    ) -> int:
        """Bind the tree to `target`, mounting it first if need be; return its minor device number.

        `settings`: those of the volume's start, for a new mount.
        """
        is_local = tree.is_local
        with self._lazy.using(key, tree.name, is_local=is_local, settings=settings) as path:
            if tree.image is not None:
                publish_later(settings, tree.image)
            mount = mount_table.find_mount(path)
            if mount is None:
                raise NotFoundError(f"the mount of {tree.name} on {path} has just gone")
            if isinstance(volume, EnvironmentVolume) and volume.writable_bytes:
                mount_writable(path, target, self._layers, volume.writable_bytes)
            else:
                bind(path, target, read_only=True)
            return mount.device_minor

    def minor(self, key: TreeKey) -> int | None:
        """Return the minor device number of a tree's mount, or None if it is not served."""
        path = self._lazy.mounted().get(key)
        mount = mount_table.find_mount(path) if path is not None else None
        return mount.device_minor if mount is not None else None

    def retire(self, in_use: frozenset[TreeKey], linger_s: float) -> None:
        """Unmount the trees that no volume has used for `linger_s`. Never raises."""
        self._lazy.retire(lambda: in_use, linger_s)


def _find_environment(settings: Settings, volume: EnvironmentVolume) -> VolumeTree:
    with open_own_store(settings) as store:
        documents = StartDocuments(settings, store)
        manifest = catalogue.find(store, volume.environment, documents)
        target = _target_of(manifest, volume)
        index = cache_index(settings, store, target, checks_store=documents.reads_store)
        admit_tree(target, index.data, privileges=settings.restore_privileges)
        if documents.reads_store:
            catalogue.note_used(store, manifest)
    return VolumeTree(target.index.digest, record_name_of(target.path))


def tree_key(volume: Volume, digest: str, workload: str) -> TreeKey:
    """Return the key under which volumes share a served tree."""
    owner = volume.owner if isinstance(volume, EnvironmentVolume) else None
    return TreeKey(digest, workload, owner)


def _target_of(manifest: Manifest, volume: EnvironmentVolume) -> Target:
    """Return the directory of a snapshot that a volume shows.

    Raises: InvalidInputError if the volume does not name one of several; UnsupportedError.
    """
    paths = [text_of(target.path) for target in manifest.targets]
    wanted = volume.target or (paths[0] if len(paths) == 1 else "")
    if wanted not in paths:
        raise InvalidInputError(
            f"the environment {volume.environment} holds {', '.join(paths)}; name one of them in "
            "the volume's attribute target"
        )
    target = manifest.targets[paths.index(wanted)]
    if not target.whole:
        raise UnsupportedError(
            f"the environment {volume.environment} holds only the changes in {wanted}, not the "
            "whole directory: a volume cannot show it; install into a directory of its own"
        )
    return target


_SHUTDOWN_S = 45.0
"""Time that a server gives open files when the node's servers end: less than the spawner waits."""
_UNWRITTEN_S = 10.0
"""Time that unpublishing waits for files being written; then the kubelet has to ask again."""
_POLL_S = 0.1
_SALT_BYTES = 32


class CheckpointServers:
    """Servers of checkpoint volumes, mounted below one folder. Callers lock the directory."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = private_directory(folder)
        self._salt = _kept_salt(folder / "salt")

    def directory_of(self, volume: CheckpointVolume, secrets: Mapping[str, str]) -> Path:
        """Return the mount point of a volume's server: one per source, options and secrets.

        Raises: InvalidInputError.
        """
        spec = describe_mount(self._settings, volume.source, Path("/"), **_choices(volume))
        key = hashlib.blake2b(to_line(spec).encode(), key=self._salt, digest_size=12)
        for name, text in sorted(secrets.items()):
            key.update(f"\0{name}\0{text}".encode())
        return self._folder / key.hexdigest()

    def mount(
        self,
        volume: CheckpointVolume,
        directory: Path,
        secrets: Mapping[str, str],
        fanout: bytes = b"",
    ) -> int:
        """Start the server at `directory` unless it runs; return its mount's minor number.

        `fanout`: address of the fan-out of the volume's start, for a new server.
        """
        minor = self.minor(directory)
        if minor is not None:
            return minor
        make_mount_point(self._settings.run_dir, directory)
        spec = mount_spec(self._settings, volume.source, directory, **_choices(volume))
        mount_checkpoints(spec, server_variables(secrets, os.environ), fanout=fanout)
        minor = self.minor(directory)
        if minor is None:
            raise UnavailableError(f"the mount of {public_url(volume.source)} has just gone")
        return minor

    def minor(self, directory: Path) -> int | None:
        """Return the minor device number of the mount at `directory`, or None if no server runs."""
        mount = mount_table.find_mount(directory) if self._server(directory) is not None else None
        return mount.device_minor if mount is not None else None

    def await_written(self, directory: Path, *, is_shared: bool) -> None:
        """Wait until files that are open for writing now are closed, or their writers have ended.

        Closed files are stored already; files of killed writers are dropped. With `is_shared`,
        other pods use the server and may go on writing, so this returns after `_UNWRITTEN_S`.

        Raises: UnavailableError if files are still being written; DeadlineError.
        """
        deadline_s = time.monotonic() + _UNWRITTEN_S
        remaining: set[str] | None = None
        while True:
            status = self._status(directory)
            if status is None:
                return
            unfinished = set(status["unfinished"])
            remaining = unfinished if remaining is None else remaining & unfinished
            if not remaining:
                return
            if time.monotonic() > deadline_s:
                if is_shared:
                    return
                names = ", ".join(sorted(remaining)[:3])
                raise UnavailableError(
                    f"{len(remaining)} files of the checkpoint folder {status['url']} are still "
                    f"being written: {names}"
                )
            time.sleep(_POLL_S)

    def _server(self, directory: Path) -> Service | None:
        found = find_checkpoints(self._settings.run_dir, directory)
        return found if found is not None and found.is_alive else None

    def _status(self, directory: Path) -> dict[str, Any] | None:
        server = self._server(directory)
        if server is None:
            return None
        try:
            return server.ask("status")
        except UnavailableError:
            # Either a new worker replaced the old one, or the server is gone with its writers.
            if self.minor(directory) is None:
                return None
            raise

    def unmount(self, directory: Path) -> None:
        """End a server that no volume uses.

        Raises: BusyError while a file is being written; CorruptError, once, if unfinished files
            were lost; BootseerError.
        """
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
                f"{len(unwritten)} files were still being written when the last volume was "
                f"unpublished, and are lost: {', '.join(unwritten[:3])}"
            )

    def unused(self, used: set[Path]) -> list[Path]:
        """Return the directories of servers that no volume uses."""
        return [path for path in self._folder.iterdir() if path.is_dir() and path not in used]


def _choices(volume: CheckpointVolume) -> dict[str, Any]:
    """Return a volume's options as fields of `MountSpec`."""
    choices, _ = parse_options(volume.options)
    return {
        "allow_other": True,
        # Pods run as any user. Unless the volume sets owners, every user in the pod may write.
        "everyone_writes": not {"uid", "gid", "umask"} & choices.keys(),
        "shutdown_s": _SHUTDOWN_S,
        **choices,
    }


def _kept_salt(path: Path) -> bytes:
    """Return the node's salt, which keeps secrets from being guessed from directory names."""
    try:
        salt = path.read_bytes()
        if len(salt) == _SALT_BYTES:
            return salt
    except FileNotFoundError:
        pass
    salt = os.urandom(_SALT_BYTES)
    write_private_file(path, salt)
    return salt
