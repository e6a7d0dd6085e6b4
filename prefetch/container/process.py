"""Process of a container: arguments, environment, folder and user, by the image's configuration.

The rules are those of docker. `resolve_user` reads files of the container's root; `find_program`
and `become` act inside of it; all else is pure.
"""

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from bootseer.errors import InvalidInputError, SetupFailedError, from_oserror
from bootseer.linux.root_paths import resolve_in_root
from bootseer.prefetch.index.records import ImageConfig

_log = logging.getLogger(__name__)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSWD_BYTES_MAX = 2**20

_HOST_ONLY = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "MAIL", "TMPDIR"),
        *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "MANPATH"),
    )
)
"""Variables that name files of the host."""


class User(Struct, frozen=True):
    """User of a process."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class ProcessSpec(Struct, frozen=True):
    """Process to run in a container."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    working_dir: str
    user: User


def arguments_of(
    config: ImageConfig, command: Sequence[str], entrypoint: str | None = None
) -> tuple[str, ...]:
    """Return entrypoint and command. Pure.

    A given `command` replaces the image's CMD. A given `entrypoint` replaces the image's ENTRYPOINT
    and CMD; an empty one stands for none.

    Raises: InvalidInputError if both are empty.
    """
    if entrypoint is None:
        arguments = (*config.entrypoint, *(command or config.cmd))
    else:
        arguments = (*((entrypoint,) if entrypoint else ()), *command)
    if not arguments:
        raise InvalidInputError("the image has no command of its own; give one after --")
    return arguments


def image_environment(config: ImageConfig) -> dict[str, str]:
    """Return the variables of the image's configuration. Pure."""
    found = {"PATH": DEFAULT_PATH}
    for line in config.env:
        name, _, value = line.partition("=")
        if name:
            found[name] = value
    return found


def job_environment(config: ImageConfig, host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job. Pure.

    The image's variables override the launcher's (rank, master address and so on), of which those
    that name files of the host are left out.
    """
    kept = {
        name: value
        for name, value in host.items()
        if name not in _HOST_ONLY and not name.startswith("XDG_")
    }
    return {**kept, **image_environment(config)}


def _lines(root: Path, path: str) -> list[list[str]]:
    """Return the fields of each line of a file like passwd in the root.

    Return no lines if the file is missing or not a regular file.
    """
    file = resolve_in_root(root, path)
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return []
        with file.open("rb") as opened:
            text = opened.read(_PASSWD_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.split(":") for line in text.splitlines() if ":" in line]


def resolve_user(root: Path, text: str) -> User:
    """Return the user that "USER", "UID", "USER:GROUP" or "UID:GID" means in the image.

    "" means root. Raises: InvalidInputError if the image's /etc/passwd or /etc/group lacks a name.
    """
    name, _, group = text.partition(":")
    name = name or "0"
    users = [line for line in _lines(root, "/etc/passwd") if len(line) >= 6]
    groups = [line for line in _lines(root, "/etc/group") if len(line) >= 4]
    entry = next((line for line in users if name in (line[0], line[2])), None)
    if entry is None and not name.isdecimal():
        raise InvalidInputError(f"the image's /etc/passwd has no user {name!r}")
    uid = _number(entry[2] if entry else name)
    gid = _number(entry[3]) if entry else 0
    supplementary: tuple[int, ...] = ()
    if group:
        found = next((line for line in groups if group in (line[0], line[2])), None)
        if found is None and not group.isdecimal():
            raise InvalidInputError(f"the image's /etc/group has no group {group!r}")
        gid = _number(found[2] if found else group)
    elif entry:
        supplementary = tuple(_number(line[2]) for line in groups if entry[0] in line[3].split(","))
    home = entry[5] if entry and entry[5].startswith("/") else "/"
    return User(uid, gid, supplementary, home)


def become(spec: ProcessSpec, *, rootless: bool) -> NoReturn:
    """Replace this process by the program of `spec`, in the current root.

    Raises: SetupFailedError, with exit code 127 if the program is missing and 126 if it cannot be
    run, as shells do; BootseerError.
    """
    try:
        become_user_in(spec.working_dir, spec.user, rootless=rootless)
        if rootless and spec.user.uid:
            _log.warning("without root, all processes of a container run as its root user")
    except OSError as error:
        raise from_oserror(error, f"start {spec.arguments[0]} in the container") from error
    program = find_program(spec)
    try:
        os.execve(program, spec.arguments, dict(spec.environment))
    except OSError as error:
        raise SetupFailedError(
            f"cannot run {spec.arguments[0]} of the image: {error.strerror}", 126
        ) from error


def become_user_in(working_dir: str, user: User, *, rootless: bool) -> None:
    """Move this process to a folder of the current root, and become the user. Raises: OSError."""
    os.makedirs(working_dir, exist_ok=True)
    os.chdir(working_dir)
    if rootless:
        return
    if (user.uid, user.gid, user.groups) != (0, 0, ()) or os.getgroups():
        os.setgroups(user.groups)
        os.setgid(user.gid)
        os.setuid(user.uid)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32 - 1:
        raise InvalidInputError(f"{text!r} in the image is not a user or group number")
    return int(text)


def find_program(spec: ProcessSpec) -> str:
    """Return the path of the program as execvp(3) finds it, in the current root.

    Raises: SetupFailedError, with exit code 127 if the program is missing and 126 if the current
    user may not run it.
    """
    name, path = spec.arguments[0], spec.environment.get("PATH", "")
    candidates = [name]
    if "/" not in name:
        candidates = [f"{folder or '.'}/{name}" for folder in path.split(":")]
    refused = False
    for candidate in candidates:
        full = os.path.join(spec.working_dir, candidate)
        try:
            if stat.S_ISREG(os.stat(full).st_mode) and os.access(full, os.X_OK):
                return full
            refused = True
        except PermissionError:
            refused = True
        except OSError:
            continue
    if refused:
        raise SetupFailedError(f"user {os.geteuid()} may not execute {name} in the image", 126)
    where = "" if "/" in name else f" in {path}"
    raise SetupFailedError(f"the image has no command {name!r}{where}", 127)
