"""The example file system of C libfuse, built from the source in Debian's package."""

import shutil
import subprocess
from pathlib import Path

from testbed.needs import MissingError

_SOURCE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")


def build_passthrough(directory: Path) -> Path:
    """Compile `passthrough_ll` into `directory`; return the path of the program.

    Raises: MissingError if the source, a compiler or the library is missing.
    """
    compiler, pkg_config = shutil.which("cc"), shutil.which("pkg-config")
    if not _SOURCE.exists():
        raise MissingError("C libfuse's example is not there; apt install libfuse3-dev")
    if compiler is None or pkg_config is None:
        raise MissingError("no C compiler or no pkg-config; apt install gcc pkg-config")
    program = directory / "passthrough_ll"
    try:
        flags = subprocess.run(
            [pkg_config, "--cflags", "--libs", "fuse3"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout.split()  # fmt: skip
        subprocess.run(
            [compiler, "-O2", "-o", str(program), str(_SOURCE), *flags],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise MissingError(f"cannot build C libfuse's example: {reason.strip()[-300:]}") from error
    return program
