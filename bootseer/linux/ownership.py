"""Trust in files and folders, judged by who owns them and who can change them.

This module alone defines the rule, for the configuration, the node's folders and doctor: everything
on the path belongs to this user, to root or to a trusted owner, and nobody else can write to it. A
folder writable for everybody is allowed on the path only if it is sticky (/tmp), where nobody can
replace the files of others. Reads only, except that it makes missing folders in a sticky one.
Stateless; any thread.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError

# The kernel's limit (MAXSYMLINKS).
_LINKS_MAX = 40
# Opens the path alone: no effect on a device, and no wait for a pipe.
_PATH_ONLY = os.O_PATH | os.O_CLOEXEC
_ALL = "all"
FOR_ALL_USERS = "is for all users"
"""Fault of a folder in which each user may have a part (/scratch, mode 1777)."""


class Owners(Struct, frozen=True):
    """Users and groups that may own and change trusted files, besides this user and root."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    """Groups whose members may write to a folder."""
    is_everybody: bool = False
    """Whether every user is trusted, so that nothing is checked."""


def parse_owners(text: str) -> Owners:
    """Return the owners in a text like "alice,1000,@train" or "all". Raises: InvalidInputError."""
    words = {word.strip() for word in text.split(",")} - {"", "root"}
    if _ALL in words:
        return Owners(is_everybody=True)
    return Owners(
        frozenset(_user_number(word) for word in words if word[0] != "@"),
        frozenset(_group_number(word[1:]) for word in words if word[0] == "@"),
    )


def _user_number(name: str) -> int:
    import pwd  # here, since few settings name owners

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise InvalidInputError(f"{name!r} is not a user of this machine") from None


def _group_number(name: str) -> int:
    import grp

    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise InvalidInputError(f"{name!r} is not a group of this machine") from None


def kind_of(status: os.stat_result) -> str:
    """Return the kind of a file in words, such as "a pipe"."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(status.st_mode), "a file")


def open_trusted(path: Path, owners: Owners) -> tuple[int, str]:
    """Open a regular file for reading, if it and every folder on its path are trusted.

    Opens each folder and link on the path once, so that the file read is the file that was judged.
    On a read-only mount nobody can change anything, so writers are not checked there (a ConfigMap's
    folder is writable for all users).

    Returns: The descriptor and ""; or -1 and the reason why the file is not trusted, as a sentence
    without its end ("it belongs to user bob (1001)"); or -1 and "" if the path is a folder.

    Raises: OSError.
    """
    todo = [part for part in str(path.absolute()).split("/")[::-1] if part not in ("", ".")]
    here = "/"
    folder = os.open("/", _PATH_ONLY)
    links = 0
    try:
        while todo:
            part = todo.pop()
            below = os.open(part, _PATH_ONLY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                status = os.fstat(below)
                here = os.path.normpath(os.path.join(here, part))
                fault = "" if owners.is_everybody else _fault_of_component(below, status, owners)
                if fault and (todo or stat.S_ISLNK(status.st_mode)):
                    return -1, f"{here} {fault}"
                if stat.S_ISLNK(status.st_mode):
                    links += 1
                    if links > _LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                    target = os.readlink("", dir_fd=below)
                    here = os.path.dirname(here)
                    if target.startswith("/"):
                        here = "/"
                        os.close(folder)
                        folder = os.open("/", _PATH_ONLY)
                    todo += [one for one in target.split("/")[::-1] if one not in ("", ".")]
                elif stat.S_ISDIR(status.st_mode):
                    folder, below = below, folder
                elif todo:
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
                elif not stat.S_ISREG(status.st_mode):
                    return -1, f"it is {kind_of(status)}, not a regular file"
                elif fault:
                    return -1, f"it {fault}"
                else:
                    return _open_same(folder, part, status), ""
            finally:
                os.close(below)
    finally:
        os.close(folder)
    return -1, ""


def _open_same(folder: int, name: str, looked: os.stat_result) -> int:
    # O_NONBLOCK in case the name has become a pipe meanwhile.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    file = os.open(name, flags, dir_fd=folder)
    if not os.path.samestat(os.fstat(file), looked):
        os.close(file)
        raise OSError(errno.ESTALE, "it has been replaced meanwhile", name)
    return file


def _fault_of_component(file: int, status: os.stat_result, owners: Owners) -> str:
    if fault := _fault_of_owner(status, owners):
        return fault
    if stat.S_ISLNK(status.st_mode) or _is_sticky(status):
        return ""
    with contextlib.suppress(OSError):
        if os.fstatvfs(file).f_flag & os.ST_RDONLY:
            return ""
    # Extended attributes cannot be read from an O_PATH descriptor, but by its path in /proc.
    return _fault_of_writers(f"/proc/self/fd/{file}", status, owners)


def fault_of_folder(path: Path, owners: Owners, *, is_shared: bool = False) -> str:
    """Return why a folder must not be used, as a sentence without its end; empty if it may be.

    Checks every folder and link on the path, and the owners of the folder's entries. A missing
    folder is allowed: whoever makes it owns it. With `is_shared` the folder itself may be sticky,
    for uses that make a folder of their own in it.
    """
    if owners.is_everybody:
        return ""
    here, status = "/", os.stat("/")
    for here, status in _path_components(path):
        if stat.S_ISLNK(status.st_mode):
            fault = _fault_of_owner(status, owners)
        else:
            fault = _fault_of_owner(status, owners) or (
                "" if _is_sticky(status) else _fault_of_writers(here, status, owners)
            )
        if fault:
            return f"{here} {fault}"
    if is_shared or here != os.path.realpath(path):
        return ""
    if _is_sticky(status):
        return f"{here} {FOR_ALL_USERS}"
    return _fault_of_entries(here, owners)


def unwritable_folder(path: Path) -> Path | None:
    """Return the nearest existing folder at or above `path` if it is not writable; else None."""
    path = path.absolute()
    there = next(filter(os.path.exists, (path, *path.parents)))
    # By effective ids, so that capabilities count, too.
    return None if os.access(there, os.W_OK, effective_ids=True) else there


def _fault_of_entries(folder: str, owners: Owners) -> str:
    # One level is enough: an entry of another user shows that the folder was once open to others,
    # and another user cannot have put anything into subfolders of this user.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if fault := _fault_of_owner(entry.stat(follow_symlinks=False), owners):
                return f"{entry.path} {fault}"
    return ""


def _path_components(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every existing folder and link on the way to `path`, the root first."""
    here, status = "/", os.stat("/")
    yield here, status
    todo = str(path.absolute()).split("/")[::-1]
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        below = os.path.join(here, part)
        try:
            if _is_sticky(status):
                # Make it now, before another user can.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(below, 0o700)
            status = os.lstat(below)
        except OSError:
            return
        yield below, status
        if not stat.S_ISLNK(status.st_mode):
            here = below
            continue
        links += 1
        target = os.readlink(below)
        if links > _LINKS_MAX:
            return
        here = "/" if target.startswith("/") else here
        todo.extend(target.split("/")[::-1])


def _is_sticky(status: os.stat_result) -> bool:
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return bool(shared and status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode))


def _fault_of_owner(status: os.stat_result, owners: Owners) -> str:
    if status.st_uid in (os.geteuid(), 0) or status.st_uid in owners.users:
        return ""
    if status.st_uid == _unmapped_user():
        return ""
    return f"belongs to {_user_name(status.st_uid)}"


def _fault_of_writers(file: int | str, status: os.stat_result, owners: Owners) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "can be changed by everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in owners.groups:
        # With an access control list, the group's bits are the maximum of all its entries.
        if _has_access_list(file):
            return "has an access control list by which others may change it"
        name, members = _group(status.st_gid)
        # Many systems give each user a private group of the same number: 0775 then equals 0755.
        if status.st_gid != status.st_uid or members:
            return f"can be changed by the group {name}"
    return ""


def _has_access_list(file: int | str) -> bool:
    try:
        return bool(os.getxattr(file, "system.posix_acl_access"))
    except OSError:
        return False


def _unmapped_user() -> int:
    """Return the id that a user namespace shows for users outside, root among them; else -1."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        ranges = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return -1
    for line in ranges:
        first, _, count = map(int, line.split())
        if first <= overflow < first + count:
            return -1
    return overflow


def _user_name(number: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"


def _group(number: int) -> tuple[str, list[str]]:
    import grp

    try:
        group = grp.getgrgid(number)
    except KeyError:
        return str(number), []
    return f"{group.gr_name} ({number})", group.gr_mem
