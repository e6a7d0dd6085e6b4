"""The configuration file `bootseer.toml`: which one is read, whether it is believed, what it says.

Alone decides that. The author of the file chooses the store, and so what jobs run. Any thread.
"""

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from bootseer.errors import InvalidInputError, from_oserror
from bootseer.linux.ownership import Owners, fault_of_file

_log = logging.getLogger(__name__)

CONFIG_VARIABLE = "BOOTSEER_CONFIG"


def read_config_file(
    environ: Mapping[str, str], owners: Owners, short_names: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """The file's path and its values by setting; "" and none without a file. `short_names`: the
    setting of each name that the file may use.

    The file that BOOTSEER_CONFIG names is read, whichever user owns it. Else it is the first one
    that there is of the working directory, the user and the machine; one of another user is left
    out, with a warning. Raises: InvalidInputError; another BootseerError for a file that cannot be
    read.
    """
    explicit = environ.get(CONFIG_VARIABLE)
    if explicit:
        text = _read(Path(explicit), Owners(is_everybody=True))
        if text is None:
            raise InvalidInputError(f"the configuration {explicit} is not a file")
        return explicit, _values(explicit, text, short_names)
    home = Path(environ.get("HOME") or "/")
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    for path in (
        Path("bootseer.toml"),
        config_home / "bootseer" / "bootseer.toml",
        Path("/etc/bootseer/bootseer.toml"),
    ):
        # Not asked for, so that one which is not there, or of another kind, is none.
        if path.is_file() and (text := _read(path, owners)) is not None:
            return str(path), _values(str(path), text, short_names)
    return "", {}


def _read(path: Path, owners: Owners) -> bytes | None:
    """None, with a warning, for a file that is not to be believed."""
    try:
        # Not blocking, in case it is a pipe by now.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                return None
            if fault := fault_of_file(file.fileno(), status, owners):
                _log.warning(
                    "warning: the configuration %s is not used: it %s; if it is meant, set %s=%s",
                    path.absolute(),
                    fault,
                    CONFIG_VARIABLE,
                    path.absolute(),
                )
                return None
            return file.read()
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
