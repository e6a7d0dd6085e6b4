"""Overlayfs mounts: layers stacked on a directory, and a tree shown over a directory.

What is written to an overlay is discarded with its mount, so no writer ever waits for a disk. Paths
are given to the kernel as descriptors, since they may contain characters with a meaning for
overlayfs. Stateless; acts on the mount namespace of the caller; any thread.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bootseer.errors import UnsupportedError, from_oserror
from bootseer.linux import namespaces

_log = logging.getLogger(__name__)


def mount_layers(
    lowers: Sequence[Path],
    scratch: Path,
    target: Path,
    *,
    source: str = "bootseer",
    options: str = "",
    flags: int = 0,
    has_renames: bool = False,
) -> None:
    """Mount the directories `lowers`, uppermost first, on `target`. Raises: OSError.

    Args:
        lowers: The read-only layers.
        scratch: Folder that already has the directories `upper` and `work`.
        target: Where to mount.
        source: Name of the overlay in the table of mounts.
        options: Further options of overlayfs; they begin with a comma.
        flags: Flags of mount(2).
        has_renames: Whether lower directories can be renamed, if the kernel supports it.
    """
    with contextlib.ExitStack() as stack:

        def by_descriptor(path: Path) -> str:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return f"/proc/self/fd/{fd}"

        lower = ":".join([by_descriptor(path) for path in lowers])
        upper, work = by_descriptor(scratch / "upper"), by_descriptor(scratch / "work")
        wanted = f"lowerdir={lower},upperdir={upper},workdir={work}{options}"
        redirects = (",redirect_dir=on", "") if has_renames else ("",)
        # The option "volatile" exists since Linux 5.10.
        tries = [f"{wanted}{one}{other}" for one in redirects for other in (",volatile", "")]
        for text in tries:
            try:
                namespaces.mount(source, target, "overlay", flags, text)
                return
            except OSError as error:
                if error.errno != errno.EINVAL or text == tries[-1]:
                    raise


def cover_directory(
    tree: Path,
    target: Path,
    scratch: Path,
    *,
    is_difference: bool,
    deletions: Sequence[bytes],
    source: str,
    privileges: bool,
) -> None:
    """Show `tree` on `target`, an existing directory, in one step.

    Device nodes in the overlay have no effect, and the restrictions of the covered mount stay.

    Args:
        tree: The directory to show.
        target: Where to mount.
        scratch: Existing empty directory for written files. If its file system cannot be an upper
            layer, a tmpfs takes them.
        is_difference: Whether the present contents of `target` show through.
        deletions: Paths below `target` that do not show through.
        source: Name of the overlay in the table of mounts.
        privileges: Whether set-user-ID bits and capabilities have an effect.

    Raises:
        UnsupportedError: This kernel has no such overlay.
        BootseerError: Another error of the mount.
    """
    try:
        # An overlay does not inherit the mount flags of the directory that it covers.
        kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NOEXEC)
        flags = namespaces.MS_NODEV | kept | (0 if privileges else namespaces.MS_NOSUID)
        _cover(tree, target, scratch, is_difference, deletions, source, flags)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise from_oserror(error, f"mount an overlay on {target}") from error
        # `scratch` lies on a file system that cannot be an upper layer, such as another overlay.
        _log.info("%s cannot be an upper directory: written files go to memory", scratch)
        try:
            namespaces.mount("tmpfs", scratch, "tmpfs", options="mode=700")
            _cover(tree, target, scratch, is_difference, deletions, source, flags)
        except OSError as again:
            with contextlib.suppress(OSError):
                namespaces.unmount(scratch)
            raise UnsupportedError(
                f"this kernel does not let us mount an overlay on {target}: {again.strerror}"
            ) from again


def _cover(
    tree: Path,
    target: Path,
    scratch: Path,
    is_difference: bool,
    deletions: Sequence[bytes],
    source: str,
    flags: int,
) -> None:
    for name in ("upper", "work"):
        (scratch / name).mkdir(mode=0o700, exist_ok=True)
    lowers = [tree]
    if is_difference:
        if deletions:
            gone = scratch / "gone"
            gone.mkdir(mode=0o700, exist_ok=True)
            _make_whiteouts(gone, target, deletions)
            lowers.append(gone)
        lowers.append(target)
    # The merged root directory has the attributes of the upper directory.
    copy_directory_attributes(tree, scratch / "upper")
    mount_layers(lowers, scratch, target, source=source, flags=flags, has_renames=True)


def copy_directory_attributes(source: Path, target: Path) -> None:
    """Copy owner, mode, extended attributes and times of a directory. Raises: OSError."""
    status = os.lstat(source)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            # Overlayfs's own attributes describe the source's layers.
            if not name.startswith(("trusted.overlay.", "user.overlay.")):
                # Attributes that the scratch file system does not support are left out.
                with contextlib.suppress(OSError):
                    os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _make_whiteouts(gone: Path, target: Path, deletions: Iterable[bytes]) -> None:
    """Make a whiteout in `gone` for each deleted path whose parent still is a directory.

    The directories above it get the attributes of those in `target`, which they hide.
    """
    deleted = set(deletions)
    top = os.fsencode(gone)
    base = os.fsencode(target)
    made: list[bytes] = []
    for path in sorted(deleted):
        if any(parent in deleted for parent in _parents(path)):
            continue  # its directory has a whiteout
        if not _is_there(base, path):
            continue
        for parent in reversed(list(_parents(path))):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(top, parent), 0o700)
                made.append(parent)
        # Overlayfs's whiteout: a character device 0/0 (Documentation/filesystems/overlayfs.rst).
        with contextlib.suppress(FileExistsError):
            os.mknod(os.path.join(top, path), stat.S_IFCHR | 0o600, os.makedev(0, 0))
    for parent in sorted(made, reverse=True):
        copy_directory_attributes(
            Path(os.fsdecode(os.path.join(base, parent))),
            Path(os.fsdecode(os.path.join(top, parent))),
        )


def _parents(path: bytes) -> Iterator[bytes]:
    while path := path.rpartition(b"/")[0]:
        yield path


def _is_there(base: bytes, path: bytes) -> bool:
    """Return whether `path` exists below `base`, and all its parents are directories."""
    for parent in _parents(path):
        try:
            if not stat.S_ISDIR(os.lstat(os.path.join(base, parent)).st_mode):
                return False
        except OSError:
            return False
    return os.path.lexists(os.path.join(base, path))
