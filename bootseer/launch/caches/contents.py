"""Selection of the files of a folder that may be kept.

This module alone decides which files are left out: locks and temporary files, secrets, files that
are being written, and links that lead outside. It opens files relative to directory descriptors and
follows no link, since untrusted programs may change the folder meanwhile.
"""

import fcntl
import logging
import os
import re
import stat
import struct
from pathlib import Path

from msgspec import Struct

from bootseer.launch.caches.units import CacheFile, unit_of
from bootseer.snapshots.scan import Entry, Scan, open_below, scan

_log = logging.getLogger(__name__)

_TEMPORARY = re.compile(
    rb"(.*\.(lock|tmp|temp|part|partial|pid|swp|incomplete|sock)|lock|\.nfs.*|tmp\..*|.*~)", re.I
)
_TEMPORARY_FOLDERS = frozenset((b"locks", b"tmp", b".locks"))
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
# Length of an ELF header, which gives the offset, size and count of the section headers.
_ELF_BYTES = 64
_LIBRARY = re.compile(rb".*\.(so|o|cubin|hsaco)(\.\d+)*")
_USED_AGAIN_NS = 24 * 3600 * 10**9


class Contents(Struct, frozen=True):
    """Files of a folder that may be kept."""

    scanned: Scan
    """Entries to pack: the files, the directories above them, and the folder itself as b""."""
    files: dict[bytes, CacheFile]


def read_contents(folder: Path, *, read_ns: tuple[int, int] = (0, 0)) -> Contents:
    """Return the files of `folder` that may be kept.

    `read_ns` is the time span in which reads are known to be the job's: an access time within it
    counts as use. Raises: InvalidInputError, NoSpaceError; OSError if the folder cannot be read.
    """
    found = scan(folder)
    if not found:
        return Contents({}, {})
    names = {path for path, entry in found.items() if path and not _is_temporary(path, entry)}
    refused = {path for path in names if _is_secret(path)}
    files: dict[bytes, CacheFile] = {}
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in sorted(names - refused):
            file = _read_file_info(top, path, found[path], read_ns)
            if file is None:
                refused.add(path)
            else:
                files[path] = file
    finally:
        os.close(top)
    # A unit that lacks one of its files may mean something else to the program.
    incomplete = {unit_of(path) for path in refused}
    whole = {path: file for path, file in files.items() if unit_of(path) not in incomplete}
    for path in sorted(refused):
        _log.info("left out, with the files of its unit: %s", os.fsdecode(path))
    return _with_folders(found, whole)


def only(contents: Contents, paths: set[bytes]) -> Contents:
    """Return the contents reduced to the files `paths`."""
    files = {path: file for path, file in contents.files.items() if path in paths}
    return _with_folders(contents.scanned, files)


def _with_folders(scanned: Scan, files: dict[bytes, CacheFile]) -> Contents:
    names = {b"", *files}
    for path in files:
        while path := path.rpartition(b"/")[0]:
            names.add(path)
    return Contents({path: scanned[path] for path in sorted(names)}, files)


def _is_temporary(path: bytes, entry: Entry) -> bool:
    """Return whether an entry is a lock or temporary file, or neither a file nor a link."""
    if not (stat.S_ISREG(entry.mode) or stat.S_ISLNK(entry.mode)):
        return True
    *folders, name = path.split(b"/")
    return bool(_TEMPORARY.fullmatch(name)) or any(
        folder in _TEMPORARY_FOLDERS or _TEMPORARY.fullmatch(folder) for folder in folders
    )


def _is_secret(path: bytes) -> bool:
    *folders, name = path.split(b"/")
    return bool(_SECRET.fullmatch(name)) or not _SECRET_FOLDERS.isdisjoint(folders)


def _read_file_info(
    top: int, path: bytes, entry: Entry, read_ns: tuple[int, int]
) -> CacheFile | None:
    """Return size and times of a file that may be kept; None if it may not, or has vanished."""
    folder, _, name = path.rpartition(b"/")
    try:
        parent = open_below(top, folder) if folder else os.dup(top)
    except OSError:
        return None
    try:
        if stat.S_ISLNK(entry.mode):
            target = os.readlink(name, dir_fd=parent)
            return (
                CacheFile(len(target), entry.mtime_ns, entry.ctime_ns)
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
        # Even with the mount option `relatime` the kernel notes the first read after a change.
        was_read = read_ns[0] <= status.st_atime_ns <= read_ns[1]
        used_ns = max(entry.mtime_ns, status.st_atime_ns if was_read else 0)
        if used_ns > entry.mtime_ns + _USED_AGAIN_NS:
            # Like ccache: the modification time of a kept file tells when it was last used.
            os.utime(name, ns=(status.st_atime_ns, used_ns), dir_fd=parent, follow_symlinks=False)
        return CacheFile(entry.size_bytes, used_ns, entry.ctime_ns)
    except OSError:
        return None
    finally:
        os.close(parent)


def _stays_inside(folder: bytes, target: bytes) -> bool:
    """Return whether the target of a link in `folder` lies inside the cache, judged by its text."""
    depth = folder.count(b"/") + 1 if folder else 0
    for part in target.split(b"/"):
        depth += {b"..": -1, b".": 0, b"": 0}.get(part, 1)
        if depth < 0:
            return False
    return not target.startswith(b"/")


def is_being_written(fd: int) -> bool:
    """Return whether some process has the file open for writing.

    Linux then refuses a read lease (fcntl(2)). False if the file system, or the owner of the file,
    does not allow leases.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_whole(fd: int) -> bool:
    """Return whether a library or object file is complete.

    Linkers write in place, so a killed one leaves a part of a file under the right name. The
    section headers come last in an ELF file; they must lie within it.
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
