"""The layers of an overlay that shows a snapshot on its target, writable.

Alone decides what they are: what is written on top; the snapshot's own tree; whiteouts for what
the set-up deleted; what was there before. Works in the caller's mount namespace. Stateless.
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
from bootseer.served.covers import mount_layers

_log = logging.getLogger(__name__)

# A directory of a lower layer can be renamed, as it could on the file system that the set-up wrote.
_OPTIONS = ",redirect_dir=on"
_GONE = "gone"


def cover_target(
    tree: Path,
    target: Path,
    scratch: Path,
    *,
    is_difference: bool,
    deletions: Sequence[bytes],
    source: str,
    privileges: bool,
) -> None:
    """Show the snapshot's `tree` on `target`, an existing directory, in one step.

    What the job writes goes to `scratch`, an existing empty directory, or to memory where its file
    system cannot take it. `is_difference`: what is in `target` now shows through, but for
    `deletions`, paths below it. Without `privileges` no set-user-ID bit or capability counts there;
    device nodes never do, nor does what the covered file system forbids.
    Raises: UnsupportedError where this kernel has no such overlay.
    """
    try:
        # An overlay does not have the flags of what it shows.
        kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NOEXEC)
        flags = namespaces.MS_NODEV | kept | (0 if privileges else namespaces.MS_NOSUID)
        _try(tree, target, scratch, is_difference, deletions, source, flags)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise from_oserror(error, f"mount a snapshot on {target}") from error
        # The cache lies on a file system that cannot be an upper layer, such as another overlay.
        _log.info("%s cannot take what is written: it goes to memory instead", scratch)
        try:
            namespaces.mount("tmpfs", scratch, "tmpfs", options="mode=700")
            _try(tree, target, scratch, is_difference, deletions, source, flags)
        except OSError as again:
            with contextlib.suppress(OSError):
                namespaces.unmount(scratch)
            raise UnsupportedError(
                f"this kernel does not let us mount an overlay on {target}: {again.strerror}"
            ) from again


def _try(
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
            gone = scratch / _GONE
            gone.mkdir(mode=0o700, exist_ok=True)
            _make_whiteouts(gone, target, deletions)
            lowers.append(gone)
        lowers.append(target)
    # The merged root has the attributes of the upper one.
    copy_attributes(tree, scratch / "upper")
    try:
        mount_layers(lowers, scratch, target, source=source, options=_OPTIONS, flags=flags)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel without redirects: directories of lower layers cannot be renamed then.
        mount_layers(lowers, scratch, target, source=source, flags=flags)


def copy_attributes(source: Path, target: Path) -> None:
    """Owner, mode, extended attributes and times of a directory. Raises: OSError."""
    status = os.lstat(source)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            # Overlayfs's own are about other layers.
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
        copy_attributes(
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
