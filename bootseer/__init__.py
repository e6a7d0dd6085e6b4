"""Bootseer cuts the start-up time of large training jobs.

For training code: `with bootseer.stage("load data"): ...` and `bootseer.ready()`. Both cost
nothing outside `bootseer run`. `bootseer.checkpoints` reads and writes checkpoints. Everything else
is the command line (`bootseer --help`).
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.timeline import Span

__version__ = "0.1.0"
__all__ = ["__version__", "ready", "stage"]

loaded_ns = time.time_ns()
"""Time at which this process began to load Bootseer, when its start begins. Nanoseconds since
1970."""


def stage(name: str, attributes: Mapping[str, str | int | float | bool] | None = None) -> "Span":
    """Return a context manager that records a stage of your own on the start's timeline."""
    from bootseer.timeline import stage as begin

    return begin(name, attributes)


def ready() -> None:
    """Report that the job is ready, which ends its start."""
    from bootseer.timeline import ready as announce

    announce()
