"""The configuration file `bootseer.toml`: which one is read, whether it is believed, what it says.

Alone decides that. The author of the file chooses the store, and so what jobs run: the file, each
folder and each symbolic link on the way to it are judged (`linux.ownership`). Any thread.
"""

import errno
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.linux.ownership import Owners, kind_of, open_believed

_log = logging.getLogger(__name__)

CONFIG_VARIABLE = "BOOTSEER_CONFIG"
_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


def read_config_file(
    environ: Mapping[str, str], owners: Owners, short_names: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """The file's path and its values by setting; "" and none without a file. `short_names`: the
    setting of each name that the file may use.

    The file that BOOTSEER_CONFIG names is read, whichever user owns it; /dev/null says nothing.
    Else it is the first one that there is of the working directory, the user and the machine; one
    that another user may have written is left out, with a warning. Raises: InvalidInputError;
    another BootseerError for a file that cannot be read.
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
    """Return what the file says that BOOTSEER_CONFIG names: a regular file, or /dev/null for no
    settings at all."""
    try:
        status = os.stat(name)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
            return b""
        # A pipe would be read once, by one of the processes of a start. Not blocking, in case it is
        # a pipe by now.
        if stat.S_ISREG(status.st_mode):
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                if stat.S_ISREG(status.st_mode):
                    return opened.read()
    except OSError as error:
        raise from_oserror(error, f"read the configuration {name}") from error
    raise InvalidInputError(
        f"the configuration {name} cannot be used: it is {kind_of(status)}, and no regular file; "
        f"name a file in {CONFIG_VARIABLE}"
    )


def _read(path: Path, owners: Owners) -> bytes | None:
    """Return what a file says that nobody has named; None where there is none, and with a warning
    where it must not be believed."""
    try:
        file, fault = open_believed(path, owners)
    except OSError as error:
        # Also a home that is not this user's to look into.
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
    # Here: most nodes have no file, and every command loads this module.
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
