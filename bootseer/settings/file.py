"""Trust in settings: the configuration file `bootseer.toml`, and the folders that are set.

Whoever writes the file or one of these folders decides what jobs run. So the owner and mode of the
file, of each folder and of each symbolic link on the way to them are checked (`linux.ownership`). A
file that is not trusted is ignored, and a folder that is not trusted or cannot be made is replaced
by another one, with a warning each: no start fails because of that. Any thread.
"""

import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from bootseer.errors import InvalidInputError, PermissionDeniedError, from_oserror
from bootseer.linux.ownership import (
    FOR_ALL_USERS,
    Owners,
    fault_of_folder,
    kind_of,
    open_trusted,
    unwritable_folder,
)

_log = logging.getLogger(__name__)

CONFIG_VARIABLE = "BOOTSEER_CONFIG"
_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


class _Folder(Struct, frozen=True):
    """Rules for the folder of a setting, which must be trusted."""

    instead_for_root: str = ""
    """Folder that root uses instead; "": none."""
    is_written: bool = True
    """Whether the folder is made if it is missing."""
    is_shared: bool = False
    """Whether all users may write to the folder: each job writes to a folder of its own there."""


# `metrics_dir` is only written to, so that it may belong to anybody.
_FOLDERS = {
    "cache_dir": _Folder("/var/cache/bootseer"),
    "run_dir": _Folder("/run/bootseer"),
    "timeline_dir": _Folder("/var/lib/bootseer/timeline", is_shared=True),
    "registry_hosts_dir": _Folder(is_written=False),
}
TRUSTED = tuple(_FOLDERS)
"""Settings whose folders decide what runs."""
# For the default store only: a store that somebody named is trusted, as a registry is.
_DEFAULT_STORE = _Folder("/var/lib/bootseer/store", is_written=False)

# ---- the file ---------------------------------------------------------------------------------


def read_config_file(
    environ: Mapping[str, str], owners: Owners, short_names: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Return the path of the configuration file and its values by setting; "" and none without one.

    The file that BOOTSEER_CONFIG names is read, whichever user owns it; /dev/null holds no
    settings. Else the first existing file of the working directory, the user and the machine is
    read; a file that another user may have written is ignored, with a warning.

    Args:
        environ: Variables of this process.
        owners: Users whose file is trusted.
        short_names: Setting of each name that the file may use.

    Raises: InvalidInputError; another BootseerError for a file that cannot be read.
    """
    explicit = environ.get(CONFIG_VARIABLE)
    if explicit:
        return explicit, _values(explicit, _read_named(explicit), short_names)
    home = Path(environ.get("HOME") or "/")
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    for path in (
        Path("bootseer.toml"),
        config_home / "bootseer" / "bootseer.toml",
        Path("/etc/bootseer/bootseer.toml"),
    ):
        text = _read(path, owners)
        if text is not None:
            return str(path), _values(str(path), text, short_names)
    return "", {}


def _read_named(name: str) -> bytes:
    """Return the content of a regular file that BOOTSEER_CONFIG names; empty for /dev/null."""
    try:
        status = os.stat(name)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
            return b""
        # A pipe can be read once only, and a start has several processes. O_NONBLOCK: the file may
        # have become a pipe since it was looked at.
        if stat.S_ISREG(status.st_mode):
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode):
                    return opened.read()
    except OSError as error:
        raise from_oserror(error, f"read the configuration {name}") from error
    raise InvalidInputError(
        f"the configuration {name} cannot be used: it is {kind_of(status)}, not a regular file; "
        f"name a file in {CONFIG_VARIABLE}"
    )


def _read(path: Path, owners: Owners) -> bytes | None:
    """Return the content of a configuration file; None if it is missing or not trusted."""
    try:
        file, fault = open_trusted(path, owners)
    except OSError as error:
        # A file in a home that this user must not enter counts as missing, too.
        if error.errno in _NOT_THERE or not os.path.lexists(path):
            return None
        raise from_oserror(error, f"read the configuration {path}") from error
    if fault:
        _log.warning(
            "warning: the configuration %s is not used: %s; if it is meant, set %s=%s",
            path.absolute(),
            fault,
            CONFIG_VARIABLE,
            path.absolute(),
        )
    if file < 0:
        return None
    try:
        with os.fdopen(file, "rb") as opened:
            return opened.read()
    except OSError as error:
        raise from_oserror(error, f"read the configuration {path}") from error


def _values(path: str, data: bytes, short_names: Mapping[str, str]) -> dict[str, str]:
    # Imported here, since every command loads this module, and most nodes have no file.
    import tomllib

    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from error
    settings = set(short_names.values())
    values: dict[str, str] = {}
    for key, value in table.items():
        name = short_names.get(key, key)
        if name not in settings:
            raise InvalidInputError(
                f"{path}: unknown setting {key!r}; known are {_listed(short_names)}"
            )
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise InvalidInputError(f"{path}: {key} must be a string or a number")
        values[name] = str(value)
    return values


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# ---- folders ----------------------------------------------------------------------------------


def _folder(setting: str) -> _Folder:
    return _FOLDERS.get(setting, _DEFAULT_STORE)


def fault_of_setting(name: str, path: Path, owners: Owners) -> str:
    """Return the reason why the folder of setting `name` must not be used; empty if it may be."""
    return fault_of_folder(path, owners, is_shared=_folder(name).is_shared)


def _cannot_be_made(name: str, path: Path) -> str:
    """Return the reason why a missing folder cannot be made; empty if it can, or is there."""
    if _folder(name).is_written and not path.exists() and (there := unwritable_folder(path)):
        return f"it is missing, and {there} is not for this user to write to"
    return ""


def trusted_folders(
    wanted: Mapping[str, Path], defaults: Mapping[str, Path], owners: Owners
) -> dict[str, Path]:
    """Return replacements for folders of `wanted` that cannot be trusted or made; warn of each.

    Raises: PermissionDeniedError if other users own every folder that could be used instead.
    """
    replaced: dict[str, Path] = {}
    for name, path in wanted.items():
        fault = fault_of_setting(name, path, owners)
        missing = "" if fault else _cannot_be_made(name, path)
        if not fault and not missing:
            continue
        for other in _alternatives(name, path, defaults[name], owners):
            if not fault_of_setting(name, other, owners) and not _cannot_be_made(name, other):
                break
        else:
            if missing:
                continue  # The part of a start that needs it says so.
            raise PermissionDeniedError(
                f"the folder {path} of the setting {name} cannot be used: {fault}; name one of "
                "your own"
            )
        replaced[name] = other
        if fault.endswith(FOR_ALL_USERS) and other == _own_part(path):
            continue  # it is what such a folder is for
        hint = "; see trusted_owners in docs/operations.md" if fault else ""
        why = (fault or missing) + hint
        _log.warning("warning: %s %s is not used, but %s: %s", name, path, other, why)
    return replaced


def _own_part(path: Path) -> Path:
    """Return this user's folder in a folder of all users."""
    return path / f"bootseer-{os.geteuid()}"


def _alternatives(name: str, path: Path, default: Path, owners: Owners) -> Iterator[Path]:
    own = _own_part(path)
    if not fault_of_folder(path, owners, is_shared=True):
        # In a folder for all users (/scratch, mode 1777), each user has a folder.
        yield own
    yield default
    if instead_for_root := _folder(name).instead_for_root:
        yield Path(instead_for_root) if os.geteuid() == 0 else Path("/var/tmp", own.name, name)
    else:
        # A folder that does not exist stands for an empty one.
        yield Path("/etc/bootseer/none")
