"""Entry point of the command line: standard files, errors as one line and an exit code.

The options of `bootseer run` and `bootseer snapshot restore` are read without click, whose import
takes longer than the start of the interpreter; all other commands are click's (`command_tree`).
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence

from bootseer.cli.grammar import read_restore, read_run
from bootseer.cli.text import begin_log, one_line, print_stderr
from bootseer.errors import EXIT_FAILURE, EXIT_OK, BootseerError, exit_code_of, missing_package

_log = logging.getLogger(__name__)
_INTERRUPTED = 130
# Variable by which a shell asks click for completions.
_COMPLETE = "_BOOTSEER_COMPLETE"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, print an error as one line, exit."""
    _open_standard_files()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    # Flushed here, since the interpreter's own flush at exit cannot set the exit code.
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _output_lost(error)
    if arguments is None:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """Exit without the clean-up of modules, which takes a quarter of a short command's time.

    Returns if threads are to be waited for.
    """
    threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
    if any(not one.daemon for one in threads):
        return
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _run(words: Sequence[str]) -> int:
    stdout = sys.stdout
    try:
        if _COMPLETE not in os.environ and (line := read_run(words)):
            from bootseer.cli.run import start_line

            begin_log(line.verbosity)
            start_line(line)
        if _COMPLETE not in os.environ and (line := read_restore(words)):
            from bootseer.cli.restore import restore_line

            begin_log(line.verbosity)
            restore_line(line)
            return EXIT_OK
        from bootseer.cli.command_tree import run_click

        return run_click(words)
    except SystemExit as error:
        if sys.stdout is not stdout:
            # Click has met a closed pipe, put a wrapper in its place, and would exit with 1.
            return _output_lost(BrokenPipeError())
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        print_stderr("bootseer: interrupted")
        return _INTERRUPTED
    except BrokenPipeError as error:
        return _output_lost(error)
    except (BootseerError, OSError) as error:
        if not isinstance(error, BootseerError) and _is_output_lost():
            return _output_lost(error)
        return _refused(error)
    except ModuleNotFoundError as error:
        said = missing_package(error)
        return _internal_error(error) if said is error else _refused(said)
    except Exception as error:
        return _internal_error(error)


def _refused(error: BaseException) -> int:
    """Print one sentence that says what failed; return the exit code."""
    _log.debug("what failed, for debugging", exc_info=True)
    print_stderr(f"bootseer: {one_line(error)}")
    return exit_code_of(error)


def _internal_error(error: Exception) -> int:
    """Print an error of Bootseer's own code as one sentence; return the exit code."""
    _log.debug("what failed, for debugging", exc_info=True)
    print_stderr(
        f"bootseer: internal error: {type(error).__name__}: {one_line(error)}; "
        "run it again with -vv and please report what that prints"
    )
    return EXIT_FAILURE


def _is_output_lost() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _output_lost(error: OSError) -> int:
    """Return the exit code for a stdout that takes no more; nothing further is sent there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        # The reader went away (`bootseer ... | head`): as if killed by SIGPIPE.
        return 141
    print_stderr(f"bootseer: cannot write to stdout: {one_line(error)}")
    return exit_code_of(error)


def _open_standard_files() -> None:
    """Open /dev/null in the place of standard files that are closed (`bootseer ... >&-`).

    Else the next file to be opened, such as a lock, would get their descriptor and the output.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # open(2) returns the lowest free number, which is this descriptor.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
