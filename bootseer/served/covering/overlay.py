"""Mounting overlayfs from directories, by descriptor: the one place that knows its options.

Stateless. Acts on the mount namespace of the caller; any thread.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from bootseer.linux import namespaces


def mount_layers(
    lowers: Sequence[Path],
    scratch: Path,
    target: Path,
    *,
    source: str = "bootseer",
    options: str = "",
    flags: int = 0,
) -> None:
    """Mount `lowers`, the uppermost first, on `target`; what is written goes to `scratch`/upper.

    `upper` and `work` are in `scratch` already. What is written is meant to go with the mount, so
    nobody ever waits for a disk. `options` begin with a comma; `flags` are those of mount(2).
    Raises: OSError.
    """
    with contextlib.ExitStack() as stack:

        def by_descriptor(path: Path) -> str:
            # A path may hold characters that mean something to overlayfs.
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return f"/proc/self/fd/{fd}"

        lower = ":".join([by_descriptor(path) for path in lowers])
        upper, work = by_descriptor(scratch / "upper"), by_descriptor(scratch / "work")
        options = f"lowerdir={lower},upperdir={upper},workdir={work}{options}"
        try:
            namespaces.mount(source, target, "overlay", flags, options + ",volatile")  # 5.10+
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            namespaces.mount(source, target, "overlay", flags, options)
