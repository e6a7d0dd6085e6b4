"""Opens the files 0, 1 and 2, which the parent process may have closed."""

import os
import sys


def open_standard_files() -> None:
    """Opens /dev/null in the place of standard files that are closed (`bootseer ... >&-`): else the
    next file that is opened, a lock or a cache, would be what prints go to."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
