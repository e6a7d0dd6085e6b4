"""`mount.bootseer SOURCE DIRECTORY -o OPTIONS`: what mount(8) runs for `mount -t bootseer`.

So that a line of /etc/fstab mounts checkpoints. Owns the translation of mount options into those of
`bootseer checkpoint mount`; exits as mount(8) wants: 0, 1 for a wrong call, 32 when mounting
failed.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.cli.output import one_line
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.settings.config import load_config
from bootseer.settings.values import parse_size

_USAGE, _FAILED = 1, 32

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


def _octal(text: str) -> int:
    return int(text, 8)


_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "uid": ("uid", int),
    "gid": ("gid", int),
    "umask": ("umask", _octal),
    "memory": ("memory_bytes", parse_size),
    "deadline": ("deadline_s", float),
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


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Source and directory, and the texts behind -o; other flags of mount(8) change nothing."""
    places: list[str] = []
    texts: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "-o":
            texts.append(next(rest, ""))
        elif argument in ("-t", "-N"):
            next(rest, None)
        elif argument.startswith("-o"):
            texts.append(argument[2:])
        elif not argument.startswith("-"):
            places.append(argument)
    return places, texts


def main() -> None:
    """Entry point."""
    places, texts = _split(sys.argv[1:])
    try:
        if len(places) != 2:
            raise InvalidInputError("usage: mount.bootseer SOURCE DIRECTORY [-o OPTIONS]")
        options, run_dir = parse_options(texts)
    except InvalidInputError as error:
        sys.stderr.write(f"mount.bootseer: {one_line(error)}\n")
        sys.exit(_USAGE)
    from bootseer.fuse.striped.mounted.life.mount import mount_checkpoints, mount_spec
    from bootseer.fuse.striped.mounted.life.mount_point import make_immutable

    try:
        settings = load_config().settings
        if run_dir is not None:
            settings = replace(settings, run_dir=run_dir)
        is_immutable = options.pop("immutable", False)
        directory = Path(places[1])
        spec = mount_spec(settings, places[0], directory, **options)
        if is_immutable:
            make_immutable(directory)
        mount_checkpoints(spec)
    except (BootseerError, OSError) as error:
        sys.stderr.write(f"mount.bootseer: {one_line(error)}\n")
        sys.exit(_FAILED)


if __name__ == "__main__":
    main()
