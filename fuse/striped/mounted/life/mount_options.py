"""Options of a checkpoint mount as lists of mount options have them: "ro,memory=1GiB".

Alone knows their names, which fstab(5), mount(8) and the volumes of Kubernetes share. Pure.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bootseer.errors import InvalidInputError
from bootseer.settings.values import parse_size

# What mount(8), fstab(5) and systemd mean for themselves, or what holds here anyway.
_IGNORED = frozenset(
    (
        *(
            "defaults",
            "rw",
            "auto",
            "noauto",
            "nofail",
            "user",
            "nouser",
            "users",
            "owner",
            "group",
        ),
        *("_netdev", "async", "noatime", "nodiratime", "relatime", "strictatime", "lazytime"),
        *("nosuid", "nodev", "exec", "noiversion"),
    )
)
_IGNORED_PREFIXES = ("x-", "X-", "comment=")
_FLAGS = {
    "ro": "read_only",
    "allow_other": "allow_other",
    "read_newest": "warm",
    # The old name of the same.
    "warm": "warm",
    "immutable": "immutable",
}


_ID_MAX = 2**32 - 2
"""The largest user or group: the next number means none."""


def _bounded(convert: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def checked(text: str) -> float:
        number = convert(text)
        # Not so is nan, too.
        if not least <= number <= most:
            raise ValueError(f"it is not from {least:g} to {most:g}")
        return number

    return checked


_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "uid": ("uid", _bounded(int, 0, _ID_MAX)),
    "gid": ("gid", _bounded(int, 0, _ID_MAX)),
    "umask": ("umask", _bounded(lambda text: int(text, 8), 0, 0o777)),
    "memory": ("memory_bytes", parse_size),
    "deadline": ("deadline_s", _bounded(float, 0.001, 86_400)),
    "stripe_unit": ("stripe_unit_bytes", parse_size),
    "stripe_count": ("stripe_count", int),
    "layout": ("layout", str),
}


def parse_options(texts: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """Arguments of `mount_spec` and `immutable`, and the run directory if one is given.

    Raises: InvalidInputError for an option that is not known: it might be one that matters.
    """
    chosen: dict[str, Any] = {}
    run_dir = None
    for option in (option for text in texts for option in text.split(",")):
        name, has_value, value = option.partition("=")
        if not option or option in _IGNORED or option.startswith(_IGNORED_PREFIXES):
            continue
        if option in _FLAGS:
            chosen[_FLAGS[option]] = True
        elif name == "run_dir" and value:
            run_dir = Path(value)
        elif name in _VALUES and has_value:
            argument, convert = _VALUES[name]
            try:
                chosen[argument] = convert(value)
            except ValueError as error:
                raise InvalidInputError(f"mount option {option!r}: {error}") from error
        else:
            raise InvalidInputError(
                f"mount option {option!r} is not known; there are "
                f"{', '.join([*_FLAGS, *(f'{name}=' for name in _VALUES), 'run_dir='])}"
            )
    return chosen, run_dir
