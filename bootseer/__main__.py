"""`python -m bootseer` is the command line, and so is the program `bootseer`."""

import gc
import os
import sys

# Most of what a command makes is what imports make, which stays: to look again and again whether
# it is garbage takes a tenth of the time of a short one. (Python's default is 700.)
_NEW_OBJECTS = 50_000
# Of `--mode`, which says that a snapshot is not mounted.
_OTHER_MODES = {"extract", "link"}
_MOUNTING = {("snapshot", "restore"), ("image", "run"), ("image", "mount")}


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
    if is_mounting(sys.argv):
        # Before what reads the command line is loaded: the server loads its code meanwhile.
        from bootseer.linux.standard_files import open_standard_files
        from bootseer.prefetch.serve.server import begin_tree_server_early

        open_standard_files()
        begin_tree_server_early()
    from bootseer.cli import main as run

    run()


def is_mounting(words: list[str]) -> bool:
    """Return whether this is a command line that probably mounts something. A wrong guess costs a
    process that ends at once, but is none for a job's command, which must have no child of ours."""
    # The values of options are no commands: a job may be called "image", its workload "run".
    from bootseer.settings.disabled import subcommand_of

    return tuple(subcommand_of(words[1:])[:2]) in _MOUNTING and not _OTHER_MODES.intersection(words)


if __name__ == "__main__":
    main()
