"""New Debian or Ubuntu systems by mmdebstrap, and their way to the registries of packages."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testbed.packages import mirror

NETWORK_FILES = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pip.conf"))
"""Files without which pip may not reach its registry; not every machine has them."""
_VARIABLES = ("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_INDEX_URL", "http_proxy", "https_proxy")


def network_variables(*more: str) -> dict[str, str]:
    """Return this process's variables for pip and its proxy, and the variables named `more`."""
    return {name: os.environ[name] for name in (*_VARIABLES, *more) if name in os.environ}


def make_system(
    suite: str,
    target: Path,
    packages: str,
    *,
    source: str = "",
    options: Sequence[str] = (),
    deadline_s: float | None = None,
) -> None:
    """Make a system with `packages` (separated by commas) in a folder or a tar file.

    `source` is a line of apt's sources, by default this machine's mirror of Debian. Raises:
    MissingError, CalledProcessError, TimeoutExpired.
    """
    words = ["mmdebstrap", "--quiet", "--variant=apt", "--mode=root", f"--include={packages}"]
    subprocess.run(
        [*words, *options, suite, target, source or mirror()], check=True, timeout=deadline_s
    )
