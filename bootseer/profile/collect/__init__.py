"""Recording of a job's Python processes until they are ready, without a change of their code.

`recording_environment` gives a command the variables by which every Python process below it first
runs `path/sitecustomize`, which loads `imports`, which loads `stages` in processes that are worth
it. All of them use only the standard library; a failure in one of them leaves its records out.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from bootseer.timeline.recorder import LAUNCHED_VARIABLE

PACKAGE = Path(__file__).resolve().parents[2]
"""Folder with the sources of `bootseer`."""
_HOOKS = "profile/collect/path"


def recording_environment(environ: Mapping[str, str], package: Path = PACKAGE) -> dict[str, str]:
    """Return variables that make a command's Python processes record; `package` has our sources."""
    places = [str(package / _HOOKS), *filter(None, [environ.get("PYTHONPATH")])]
    launched = f"{os.getpid()}:{time.time_ns()}"
    return {**environ, "PYTHONPATH": os.pathsep.join(places), LAUNCHED_VARIABLE: launched}
