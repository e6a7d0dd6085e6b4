"""`python -m bootseer` is the command line, and so is the program `bootseer`."""

import gc
import os
import sys

# Most of what a command makes is what imports make, which stays: to look again and again whether
# it is garbage takes a tenth of the time of a short one. (Python's default is 700.)
_NEW_OBJECTS = 50_000


def main() -> None:
    """Run the command that the arguments say, and exit."""
    if "BOOTSEER_DISABLE" in os.environ:
        from bootseer.settings.disabled import become_command

        become_command(sys.argv[1:])
    try:
        _run()
    except KeyboardInterrupt:
        # While something was being loaded; later the command line sees to it.
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
    from bootseer.cli import main as run

    run()


if __name__ == "__main__":
    main()
