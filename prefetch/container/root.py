"""Root directory of a container: an overlay over an image's tree, and the mounts in it.

Mounts /proc, /sys and /dev, the host's files for name resolution, and the user's binds. Works in
the mount namespace of the caller, which must be private. The image is not trusted: paths are
resolved so that no link in it leads out of the root.
"""

import errno
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError, NotFoundError, UnsupportedError, from_oserror
from bootseer.linux import namespaces
from bootseer.linux.namespaces import MS_BIND, MS_REC
from bootseer.linux.overlay import mount_layers
from bootseer.linux.root_paths import resolve_in_root
from bootseer.served.overlays import container_source

_log = logging.getLogger(__name__)

_HOST_FILES = ("/etc/resolv.conf", "/etc/hosts")
"""Files for name resolution: containers use the host's network."""


class Bind(Struct, frozen=True):
    """File or directory of the host that is shown in the container."""

    source: Path
    target: str
    read_only: bool = False


def host_binds() -> list[Bind]:
    """Return read-only binds of the host's files that every container needs."""
    files = [(name, Path(name)) for name in _HOST_FILES]
    return [Bind(path.resolve(), name, read_only=True) for name, path in files if path.exists()]


def parse_bind(text: str) -> Bind:
    """Parse "SRC:DST" or "SRC:DST:ro". Raises: InvalidInputError, NotFoundError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise InvalidInputError(f"{text!r} is not a bind; write SRC:/DST or SRC:/DST:ro")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise NotFoundError(f"cannot bind {source}: it does not exist")
    return Bind(path, target, mode == "ro")


def _make_target(root: Path, path: str, *, is_dir: bool) -> Path:
    """Return a directory or file in the root to mount on. It is created if it is missing."""
    target = resolve_in_root(root, path)
    if target == root:
        raise InvalidInputError(f"cannot mount on {path} of a container: that is its root")
    if is_dir:
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=0o644)
    return target


def mount_overlay(tree: Path, scratch: Path, root: Path, *, rootless: bool) -> None:
    """Mount an overlay on `root`, with `tree` below and the upper directory in `scratch`.

    Raises: UnsupportedError if this kernel does not allow it.
    """
    try:
        _try_overlay(tree, scratch, root, rootless)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise _overlay_error(error) from error
        # Some file systems cannot have an upper directory, such as another overlay.
        _log.warning("%s cannot take a container's writes: they go to memory instead", scratch)
        try:
            namespaces.mount("tmpfs", scratch, "tmpfs", options="mode=700")
            _try_overlay(tree, scratch, root, rootless)
        except OSError as again:
            raise _overlay_error(again) from again


def _overlay_error(error: OSError) -> UnsupportedError:
    return UnsupportedError(
        f"this kernel refuses to mount an overlay file system: {error.strerror}; run as "
        "root, or use `bootseer image mount` for read-only access"
    )


def _try_overlay(tree: Path, scratch: Path, root: Path, rootless: bool) -> None:
    upper, work = scratch / "upper", scratch / "work"
    upper.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    # The attributes of the upper directory are shown as those of "/".
    status = tree.stat()
    if not rootless:
        os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(stat.S_IMODE(status.st_mode))
    options = ",userxattr" if rootless else ""
    mount_layers([tree], scratch, root, source=container_source(scratch), options=options)


def populate(root: Path, binds: Sequence[Bind]) -> None:
    """Mount what programs need, and the user's binds. Raises: InvalidInputError, BootseerError."""
    try:
        for path in ("/proc", "/sys", "/dev"):
            target = _make_target(root, path, is_dir=True)
            namespaces.mount(path, target, flags=MS_BIND | MS_REC)
        tmp = resolve_in_root(root, "/tmp")
        if not tmp.exists():
            tmp.mkdir(parents=True)
            tmp.chmod(0o1777)
        for bind in (*host_binds(), *binds):
            bind_into(root, bind)
    except OSError as error:
        raise from_oserror(
            error, f"set up the container's {error.filename2 or error.filename}"
        ) from error


def bind_into(root: Path, bind: Bind) -> None:
    """Mount `bind.source` on `bind.target` in the root. Raises: OSError, InvalidInputError."""
    target = _make_target(root, bind.target, is_dir=bind.source.is_dir())
    if bind.read_only:
        namespaces.bind_read_only(bind.source, target)
    else:
        namespaces.mount(bind.source, target, flags=MS_BIND | MS_REC)
