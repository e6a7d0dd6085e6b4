"""The owner of a file or folder, and whether what lies there may be acted upon.

Alone owns that rule, for the configuration, the node's folders and doctor: everything on the way
belongs to this user, to root or to a trusted owner, and nobody else can write to it. A folder that
everybody may write to is on the way to a trusted one only if it is sticky (/tmp), since nobody can
replace there what belongs to others. Looks, and makes nothing but a folder of ours in a sticky one.
Stateless; any thread.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError

# As the kernel counts (MAXSYMLINKS).
_LINKS_MAX = 40
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


def fault_of_file(file: int, status: os.stat_result, owners: Owners) -> str:
    """Why an open file with this status must not be believed: "belongs to user bob (1001)". Empty
    if it may be."""
    if owners.is_everybody:
        return ""
    return _fault_of_owner(status, owners) or _fault_of_writers(file, status, owners)


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
