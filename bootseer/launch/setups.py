"""The environment stage of a start: one set-up, whose snapshot is restored, or which runs.

Main thread only: a server that it needs is forked.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from bootseer import loaded_ns
from bootseer.launch.job import Job
from bootseer.served.ready_socket import add_ready_names
from bootseer.timeline.otlp import LIVE, WAITED_FOR

if TYPE_CHECKING:
    import subprocess

    from bootseer.launch.place import Place
    from bootseer.settings.config import Settings
    from bootseer.timeline.recorder import Span, Timeline


def set_up(
    settings: "Settings",
    job: "Job",
    command: list[str],
    place: "Place",
    timeline: "Timeline",
    span: "Span",
    say: Callable[[str], None],
    *,
    before_own_view: Callable[[], object],
) -> None:
    """Make the targets of one set-up of `job`; `span` is its stage, above `timeline`.

    Raises: what `snapshots.environment.run_setup` raises.
    """
    from bootseer.snapshots.environment import run_setup
    from bootseer.snapshots.key import Request, run_plainly

    request = Request(
        command=command,
        targets=job.targets,
        inputs=job.inputs,
        variables=job.variables,
        runner=run_plainly,
    )
    request = place.request(request)
    request = replace(request, runner=_without_stdin(request.runner))

    host = _Host(timeline, before_own_view)
    result = run_setup(settings, request, report=say, forks=True, host=host)
    add_ready_names(os.environ, *result.ready_names)
    if result.mode:
        span.set("bootseer.mode", result.mode)
    span.set("bootseer.hit", result.hit)
    span.set("bootseer.bytes", result.moved_bytes)
    # An image's root is made anew by each start: what is kept for it is what it is a link to.
    is_live = result.mode and (result.how == "in place" or (place.is_image and result.was_here))
    changed = "changed: " if result.is_changed else ""
    span.set("bootseer.how", LIVE if is_live else changed + result.how)


class _Host:
    """The start, as a set-up sees it: the job that this process becomes uses what is mounted."""

    def __init__(self, timeline: "Timeline", before_own_view: Callable[[], object]) -> None:
        self._timeline = timeline
        self._before_own_view = before_own_view

    def before_own_view(self) -> None:
        """See `snapshots.environment.Host`."""
        self._before_own_view()

    def waiting_for(self, node: str, created_ns: int) -> Callable[[], object]:
        """Begin the stage of waiting for `node`; see `snapshots.environment.Host`."""
        if 0 < created_ns < loaded_ns:
            return lambda: None  # another start has made it
        return self._timeline.span("wait for set-up", {WAITED_FOR: node}).end


def _without_stdin(
    runner: "Callable[..., subprocess.CompletedProcess[bytes]]",
) -> "Callable[..., subprocess.CompletedProcess[bytes]]":
    """The runner, but what is on our stdin is for the job."""
    import subprocess

    def run(args: Any, /, *, stdin: int | None = None, **options: Any) -> Any:
        return runner(args, stdin=subprocess.DEVNULL if stdin is None else stdin, **options)

    return run
