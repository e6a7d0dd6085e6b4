"""Program `bootseer`, also started by `python -m bootseer`."""

import gc
import os
import sys

# Most objects of a command are made by imports and stay: collecting garbage as often as Python does
# by default (every 700 new objects) takes a tenth of a short command's time.
_NEW_OBJECTS = 50_000


def main() -> None:
    """Run the command of this program's arguments, and exit."""
    if "BOOTSEER_DISABLE" in os.environ:
        from bootseer.cli.disabled import become_command

        become_command(sys.argv[1:])
    try:
        _run()
    except KeyboardInterrupt:
        # Pressed while modules were loaded; later `bootseer.cli.main` handles it.
        sys.exit(130)
    except ModuleNotFoundError as error:
        from bootseer.errors import exit_code_of, missing_package

        said = missing_package(error)
        if said is error:
            raise
        sys.stderr.write(f"bootseer: {said}\n")
        sys.exit(exit_code_of(said))


def _run() -> None:
    gc.set_threshold(_NEW_OBJECTS)
    _load_msgspec()
    from bootseer.cli.main import main as run

    run()


def _load_msgspec() -> None:
    """Import msgspec without typing_extensions.

    msgspec prefers that module to `typing` where it is installed, for the sake of Python 3.10 and
    older; with its imports it takes as long as click.
    """
    name = "typing_extensions"
    if name in sys.modules:
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules[name]


if __name__ == "__main__":
    main()
