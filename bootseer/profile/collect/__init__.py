"""Notes what the Python processes of a job do until they are ready, without a change of their code.

`watched` gives a command the variables by which every Python process below it runs
`path/sitecustomize` first, which loads `imports`, which loads `notes` in processes that are
worth it. All of it uses nothing but the standard library, and whatever fails in it is absent.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from bootseer.timeline.recorder import LAUNCHED_VARIABLE

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of the sources of `bootseer`."""
_HOOKS = "profile/collect/path"


def watched(environ: Mapping[str, str], package: Path = PACKAGE) -> dict[str, str]:
    """Variables for a command whose Python processes are watched.

    `package` is where they find our sources.
    """
    places = [str(package / _HOOKS), *filter(None, [environ.get("PYTHONPATH")])]
    launched = f"{os.getpid()}:{time.time_ns()}"
    return {**environ, "PYTHONPATH": os.pathsep.join(places), LAUNCHED_VARIABLE: launched}
