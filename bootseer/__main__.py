"""`python -m bootseer` is the command line, and so is the program `bootseer`."""

import gc

# Most of what a command makes is what imports make, which stays: to look again and again whether
# it is garbage takes a tenth of the time of a short one. (Python's default is 700.)
_NEW_OBJECTS = 50_000


def main() -> None:
    """Run the command that the arguments say, and exit."""
    gc.set_threshold(_NEW_OBJECTS)
    from bootseer.cli import main as run

    run()


if __name__ == "__main__":
    main()
