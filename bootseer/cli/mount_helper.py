"""Helper of mount(8) for checkpoints: `mount.bootseer SOURCE DIRECTORY -o OPTIONS`.

mount(8) runs it for `mount -t bootseer` and for lines of /etc/fstab. Exit codes are those of
mount(8): 0, 1 for a wrong call, 32 for a mount that failed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from bootseer.cli.text import one_line
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fuse.striped.mounted.options import parse_options
from bootseer.settings.config import load_config

_USAGE, _FAILED = 1, 32


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return source and directory, and the values of -o; other flags of mount(8) are ignored."""
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
    """Mount as mount(8) asks, and exit."""
    places, texts = _split(sys.argv[1:])
    try:
        if len(places) != 2:
            raise InvalidInputError("usage: mount.bootseer SOURCE DIRECTORY [-o OPTIONS]")
        options, run_dir = parse_options(texts)
    except InvalidInputError as error:
        sys.stderr.write(f"mount.bootseer: {one_line(error)}\n")
        sys.exit(_USAGE)
    from bootseer.fuse.striped.mounted.mount import make_immutable, mount_checkpoints, mount_spec

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
