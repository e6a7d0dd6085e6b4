"""What of a folder may be kept: whole files of the cache, and nothing else that lies there.

Alone decides what is left out: locks and temporary files, secrets, what somebody still writes, and
links that lead outside. Looks through descriptors, and follows no link: programs that we do not
trust may write there meanwhile.
"""

import fcntl
import logging
import os
import re
import stat
import struct
from pathlib import Path

from msgspec import Struct

from bootseer.launch.caches.units import File, unit_of
from bootseer.snapshots.scan import Entry, Scan, open_below, scan

_log = logging.getLogger(__name__)

_PASSING = re.compile(
    rb"(.*\.(lock|tmp|temp|part|partial|pid|swp|incomplete|sock)|lock|\.nfs.*|tmp\..*|.*~)", re.I
)
_PASSING_FOLDERS = frozenset((b"locks", b"tmp", b".locks"))
_SECRET = re.compile(
    rb"(\.?(netrc|env|git-credentials|pypirc|pgpass)|stored_tokens"
    rb"|((hf|auth|access|api|refresh|id|bearer|git(hub|lab)|gh)[._-]?)?token(\.\w+)?"
    rb"|(.*[._-])?credentials?(\.\w+)?|(.*[._-])?secrets?(\.\w+)?|(.*[._-])?passw(or)?d(\.\w+)?"
    rb"|id_(rsa|dsa|ecdsa|ed25519).*|.*\.(pem|p12|pfx|jks|keytab|kdbx|key)|known_hosts"
    rb"|kubeconfig|service[_-]account.*\.json)",
    re.I,
)
_SECRET_FOLDERS = frozenset((b".ssh", b".aws", b".gnupg", b".kube", b".docker", b".azure"))
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Of an ELF file's head: where the section headers are, how long one is, how many there are.
_ELF_BYTES = 64
_LIBRARY = re.compile(rb".*\.(so|o|cubin|hsaco)(\.\d+)*")
_USED_AGAIN_NS = 24 * 3600 * 10**9


class Contents(Struct, frozen=True):
    """What of a folder may be kept."""

    scanned: Scan
    """Names that may be packed, with the directories above them and the folder itself, as b""."""
    files: dict[bytes, File]


def look(folder: Path, *, read_ns: tuple[int, int] = (0, 0)) -> Contents:
    """What lies in `folder` now and may be kept.

    `read_ns`: what was read between these times was of use; later it may have been us.
    Raises: InvalidInputError, NoSpaceError, OSError of reading it.
    """
    found = scan(folder)
    if not found:
        return Contents({}, {})
    names = {path for path, entry in found.items() if path and not _is_passing(path, entry)}
    refused = {path for path in names if _is_secret(path)}
    files: dict[bytes, File] = {}
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in sorted(names - refused):
            file = _look_at(top, path, found[path], read_ns)
            if file is None:
                refused.add(path)
            else:
                files[path] = file
    finally:
        os.close(top)
    # What misses one of its files may mean something else to the program.
    without = {unit_of(path) for path in refused}
    whole = {path: file for path, file in files.items() if unit_of(path) not in without}
    for path in sorted(refused):
        _log.info("left out, with what belongs to it: %s", os.fsdecode(path))
    return _with_folders(found, whole)


def only(contents: Contents, paths: set[bytes]) -> Contents:
    """The contents with no other files than these."""
    files = {path: file for path, file in contents.files.items() if path in paths}
    return _with_folders(contents.scanned, files)


def _with_folders(scanned: Scan, files: dict[bytes, File]) -> Contents:
    names = {b"", *files}
    for path in files:
        while path := path.rpartition(b"/")[0]:
            names.add(path)
    return Contents({path: scanned[path] for path in sorted(names)}, files)


def _is_passing(path: bytes, entry: Entry) -> bool:
    """Whether it is no file, or a lock or temporary file, which nobody misses."""
    if not (stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode)):
        return True
    *folders, name = path.split(b"/")
    return bool(_PASSING.fullmatch(name)) or any(
        folder in _PASSING_FOLDERS or _PASSING.fullmatch(folder) for folder in folders
    )


def _is_secret(path: bytes) -> bool:
    *folders, name = path.split(b"/")
    return bool(_SECRET.fullmatch(name)) or not _SECRET_FOLDERS.isdisjoint(folders)


def _look_at(top: int, path: bytes, entry: Entry, read_ns: tuple[int, int]) -> File | None:
    """The file, if it is one that may be kept; None also where it has gone meanwhile."""
    folder, _, name = path.rpartition(b"/")
    try:
        parent = open_below(top, folder) if folder else os.dup(top)
    except OSError:
        return None
    try:
        if stat.S_ISLNK(entry.mode):
            target = os.readlink(name, dir_fd=parent)
            return (
                File(len(target), entry.mtime_ns, entry.ctime_ns)
                if _stays_inside(folder, target)
                else None
            )
        fd = os.open(name, _OPEN, dir_fd=parent)
        try:
            if _LIBRARY.fullmatch(name) and not is_whole(fd):
                return None
            if is_being_written(fd):
                return None
            status = os.fstat(fd)
        finally:
            os.close(fd)
        # The kernel notes the first read behind a change, also where it notes few (`relatime`).
        was_read = read_ns[0] <= status.st_atime_ns <= read_ns[1]
        used_ns = max(entry.mtime_ns, status.st_atime_ns if was_read else 0)
        if used_ns > entry.mtime_ns + _USED_AGAIN_NS:
            # As ccache does: with the file goes when it was last of use.
            os.utime(name, ns=(status.st_atime_ns, used_ns), dir_fd=parent, follow_symlinks=False)
        return File(entry.size_bytes, used_ns, entry.ctime_ns)
    except OSError:
        return None
    finally:
        os.close(parent)


def _stays_inside(folder: bytes, target: bytes) -> bool:
    """Whether a link in `folder` leads to something in the cache, by its name."""
    depth = folder.count(b"/") + 1 if folder else 0
    for part in target.split(b"/"):
        depth += {b"..": -1, b".": 0, b"": 0}.get(part, 1)
        if depth < 0:
            return False
    return not target.startswith(b"/")


def is_being_written(fd: int) -> bool:
    """Whether some process has the open file open for writing: then no read lease can be had
    (fcntl(2)). False where the file system, or the owner of the file, does not let us ask."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_whole(fd: int) -> bool:
    """Whether a library or object file is not the half of one: linkers write in place, and one that
    is killed leaves a file of the right name. The section headers, which come last, must be in it.
    """
    head = os.pread(fd, _ELF_BYTES, 0)
    if len(head) < _ELF_BYTES or head[:4] != b"\x7fELF":
        return False
    order = "<" if head[5] == 1 else ">"
    if head[4] == 2:
        (place,) = struct.unpack_from(f"{order}Q", head, 40)
        size, count = struct.unpack_from(f"{order}HH", head, 58)
    else:
        (place,) = struct.unpack_from(f"{order}I", head, 32)
        size, count = struct.unpack_from(f"{order}HH", head, 46)
    return bool(place > 0 and place + size * count <= os.fstat(fd).st_size)
