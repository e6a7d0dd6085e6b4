"""Mounts of overlayfs: layers on a directory, and a tree over what a directory holds.

What is written to an overlay is meant to go with its mount, so no writer ever waits for a disk.
Paths go to the kernel as descriptors: they may hold characters that mean something to overlayfs.
Stateless; acts on the mount namespace of the caller; any thread.
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
    """Mount `lowers`, the uppermost first, on `target`; `scratch`/upper is the upper directory.

    Args:
        scratch: Folder that has `upper` and `work` already.
        options: Further options of overlayfs; they begin with a comma.
        flags: Flags of mount(2).
        has_renames: Whether directories of the lower layers can be renamed, where the kernel can do
            that.

    Raises:
        OSError: The kernel refused the mount.
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
        # "volatile" came with Linux 5.10.
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

    Device nodes never count below the overlay, nor does what the covered file system forbids.

    Args:
        scratch: Existing empty directory that takes what is written. Memory takes it where the file
            system of `scratch` cannot be an upper layer.
        is_difference: Whether the present contents of `target` show through.
        deletions: Paths below `target` that do not show through.
        source: Name of the overlay in the table of mounts.
        privileges: Whether set-user-ID bits and capabilities count.

    Raises:
        UnsupportedError: This kernel has no such overlay.
        BootseerError: Another error of the mount.
    """
    try:
        # An overlay does not have the flags of what it shows.
        kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NOEXEC)
        flags = namespaces.MS_NODEV | kept | (0 if privileges else namespaces.MS_NOSUID)
        _cover(tree, target, scratch, is_difference, deletions, source, flags)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise from_oserror(error, f"mount an overlay on {target}") from error
        # `scratch` lies on a file system that cannot be an upper layer, such as another overlay.
        _log.info("%s cannot take what is written: it goes to memory instead", scratch)
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
    # The merged root has the attributes of the upper one.
    copy_directory_attributes(tree, scratch / "upper")
    mount_layers(lowers, scratch, target, source=source, flags=flags, has_renames=True)


def copy_directory_attributes(source: Path, target: Path) -> None:
    """Copy owner, mode, extended attributes and times of a directory. Raises: OSError."""
    status = os.lstat(source)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            # Attributes of overlayfs are about other layers.
            if not name.startswith(("trusted.overlay.", "user.overlay.")):
                # What the scratch file system may not have is left out, as an extraction does.
                with contextlib.suppress(OSError):
                    os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def _make_whiteouts(gone: Path, target: Path, deletions: Iterable[bytes]) -> None:
    """One for each deleted path whose parent is still a directory; nothing else is covered.

    The directories above it are as in `target`, whose own attributes they hide.
    """
    deleted = set(deletions)
    top = os.fsencode(gone)
    base = os.fsencode(target)
    made: list[bytes] = []
    for path in sorted(deleted):
        if any(parent in deleted for parent in _parents(path)):
            continue  # goes with its directory
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
    """The nearest first; not the top."""
    while path := path.rpartition(b"/")[0]:
        yield path


def _is_there(base: bytes, path: bytes) -> bool:
    """Whether `path` exists below `base`, all of its parents being directories themselves."""
    for parent in _parents(path):
        try:
            if not stat.S_ISDIR(os.lstat(os.path.join(base, parent)).st_mode):
                return False
        except OSError:
            return False
    return os.path.lexists(os.path.join(base, path))
