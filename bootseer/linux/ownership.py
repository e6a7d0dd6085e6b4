"""The owner of a file or folder, and whether what lies there may be acted upon.

Alone owns that rule, for the configuration, the node's folders and doctor: everything on the way
belongs to this user, to root or to a trusted owner, and nobody else can write to it. A folder that
everybody may write to is on the way to a trusted one only if it is sticky (/tmp), since nobody can
replace there what belongs to others. Looks, and makes nothing but a folder of ours in a sticky one.
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

# As the kernel counts (MAXSYMLINKS).
_LINKS_MAX = 40
# Opens nothing: a device notices nothing, and a pipe does not wait.
_LOOK = os.O_PATH | os.O_CLOEXEC
_ALL = "all"
FOR_ALL_USERS = "is for all users"
"""What is wrong with a folder in which each user may have a part (/scratch, mode 1777)."""


class Owners(Struct, frozen=True):
    """The users who may own, and write to, files that this user trusts, besides this user and
    root."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    """Members of these may write to a folder."""
    is_everybody: bool = False
    """Whether every user is trusted: then nothing is checked."""


def parse_owners(text: str) -> Owners:
    """The owners in text such as "alice,1000,@train", where @ names a group; or "all". Raises:
    InvalidInputError."""
    words = {word.strip() for word in text.split(",")} - {"", "root"}
    if _ALL in words:
        return Owners(is_everybody=True)
    return Owners(
        frozenset(_user_number(word) for word in words if word[0] != "@"),
        frozenset(_group_number(word[1:]) for word in words if word[0] == "@"),
    )


def _user_number(name: str) -> int:
    import pwd  # here, as with groups: few settings name owners

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise InvalidInputError(f"{name!r} is no user of this machine") from None


def _group_number(name: str) -> int:
    import grp

    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise InvalidInputError(f"{name!r} is no group of this machine") from None


def kind_of(status: os.stat_result) -> str:
    """Return the kind of a file in words: "a pipe"."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(status.st_mode), "a file")


def open_believed(path: Path, owners: Owners) -> tuple[int, str]:
    """Open a regular file for reading, and every folder and symbolic link on the way to it once,
    without following links: what was judged is what is read.

    Return the descriptor and an empty text; or -1 and why the file must not be believed, as a
    sentence without its end ("it belongs to user bob (1001)"). On a read-only mount nobody can
    change anything (a ConfigMap's folder is for all users). A folder is none that is read: -1 and
    an empty text. Raises: OSError.
    """
    todo = [part for part in str(path.absolute()).split("/")[::-1] if part not in ("", ".")]
    here = "/"
    folder = os.open("/", _LOOK)
    links = 0
    try:
        while todo:
            part = todo.pop()
            below = os.open(part, _LOOK | os.O_NOFOLLOW, dir_fd=folder)
            try:
                status = os.fstat(below)
                here = os.path.normpath(os.path.join(here, part))
                fault = "" if owners.is_everybody else _fault_on_the_way(below, status, owners)
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
                        folder = os.open("/", _LOOK)
                    todo += [one for one in target.split("/")[::-1] if one not in ("", ".")]
                elif stat.S_ISDIR(status.st_mode):
                    folder, below = below, folder
                elif todo:
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
                elif not stat.S_ISREG(status.st_mode):
                    return -1, f"it is {kind_of(status)}, and no regular file"
                elif fault:
                    return -1, f"it {fault}"
                else:
                    return _opened(folder, part, status), ""
            finally:
                os.close(below)
    finally:
        os.close(folder)
    return -1, ""


def _opened(folder: int, name: str, looked: os.stat_result) -> int:
    # Not blocking, in case it is a pipe by now.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    file = os.open(name, flags, dir_fd=folder)
    if not os.path.samestat(os.fstat(file), looked):
        os.close(file)
        raise OSError(errno.ESTALE, "it has been replaced meanwhile", name)
    return file


def _fault_on_the_way(file: int, status: os.stat_result, owners: Owners) -> str:
    if fault := _fault_of_owner(status, owners):
        return fault
    if stat.S_ISLNK(status.st_mode) or _is_sticky(status):
        return ""
    with contextlib.suppress(OSError):
        if os.fstatvfs(file).f_flag & os.ST_RDONLY:
            return ""
    # No extended attribute can be read from a descriptor that is only looked at.
    return _fault_of_writers(f"/proc/self/fd/{file}", status, owners)


def fault_of_folder(path: Path, owners: Owners, *, is_shared: bool = False) -> str:
    """Why a folder must not be used, as a sentence without its end. Empty if it may be.

    Looks at every folder and symbolic link on the way to it, and at the owners of what lies in
    it. What is missing is fine: who makes it owns it. `is_shared`: the folder itself may be sticky,
    for uses that make a folder of their own below it.
    """
    if owners.is_everybody:
        return ""
    here, status = "/", os.stat("/")
    for here, status in _way_to(path):
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


def unwritable(path: Path) -> Path | None:
    """The path, or the nearest folder above it that exists, where this process cannot write to it;
    None where it can."""
    path = path.absolute()
    there = next(filter(os.path.exists, (path, *path.parents)))
    # By the rights in effect: capabilities open folders, too.
    return None if os.access(there, os.W_OK, effective_ids=True) else there


def _fault_of_entries(folder: str, owners: Owners) -> str:
    # A user who can enter has a part of it; no other user can have put anything into folders of
    # ours.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if fault := _fault_of_owner(entry.stat(follow_symlinks=False), owners):
                return f"{entry.path} {fault}"
    return ""


def _way_to(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder and symbolic link that the kernel passes on the way to `path`, the root first,
    as far as they exist."""
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
                # The user who makes it first owns it.
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
    """Returns whether a shared folder lets users remove and rename only their own files."""
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
        # The group's bits are those of the list then, whichever users are in it.
        if _has_access_list(file):
            return "has an access control list by which others may change it"
        name, members = _group(status.st_gid)
        # Many systems give each user a group of the same number: mode 0775 then means 0755.
        if status.st_gid != status.st_uid or members:
            return f"can be changed by the group {name}"
    return ""


def _has_access_list(file: int | str) -> bool:
    try:
        return bool(os.getxattr(file, "system.posix_acl_access"))
    except OSError:
        return False


def _unmapped_user() -> int:
    """The user id as which a user namespace shows all users outside of it, root among them; -1
    where there is no such namespace, or where that number is also a user's inside."""
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
