"""The environment stage of a start: one set-up, whose snapshot is restored, or which runs.

Alone knows what a set-up is in the image of a start. Main thread
only: a server that it needs is forked.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from bootseer import loaded_ns
from bootseer.fuse.striped.mounted.job_mount import LIVE
from bootseer.launch.job import Job
from bootseer.served.ready_socket import add_ready_names
from bootseer.timeline.otlp import WAITED_FOR

if TYPE_CHECKING:
    import subprocess

    from bootseer.prefetch.container.container import Container
    from bootseer.settings.config import Settings
    from bootseer.snapshots.key import Request
    from bootseer.timeline.recorder import Span, Timeline


def set_up(
    settings: "Settings",
    job: "Job",
    command: list[str],
    container: "Container | None",
    timeline: "Timeline",
    span: "Span",
    say: Callable[[str], None],
    *,
    before_own_view: Callable[[], None],
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
        runner=_without_stdin(run_plainly),
    )
    if container is not None:
        request = _inside(container, request)

    host = _Host(timeline, before_own_view)
    result = run_setup(settings, request, report=say, forks=True, host=host)
    add_ready_names(os.environ, *result.ready_names)
    if result.mode:
        span.set("bootseer.mode", result.mode)
    span.set("bootseer.hit", result.hit)
    span.set("bootseer.bytes", result.moved_bytes)
    # An image's root is made anew by each start: what is kept for it is what it is a link to.
    is_live = result.mode and (result.how == "in place" or (container and result.was_here))
    changed = "changed: " if result.is_changed else ""
    span.set("bootseer.how", LIVE if is_live else changed + result.how)


class _Host:
    """The start, as a set-up sees it: the job that this process becomes uses what is mounted."""

    def __init__(self, timeline: "Timeline", before_own_view: Callable[[], None]) -> None:
        self._timeline = timeline
        self.before_own_view = before_own_view

    def waiting_for(self, node: str, created_ns: int) -> Callable[[], object]:
        """Begin the stage of waiting for `node`; see `snapshots.environment.Host`."""
        if 0 < created_ns < loaded_ns:
            return lambda: None  # another start has made it
        return self._timeline.span("wait for set-up", {WAITED_FOR: node}).end


def _inside(container: "Container", request: "Request") -> "Request":
    """The set-up as it runs inside the container, which is entered."""
    from bootseer.launch.image import container_environment, container_layers

    container.enter()
    return replace(
        request,
        # Not the index, which is another one once the image is published.
        base=container.image.record.identity,
        root=container.root,
        scratch=container.scratch / "setups",
        layers=container_layers(container),
        directory=container.config.working_dir or "/",
        environ=container_environment(container),
        runner=_without_stdin(container.run),
    )


def _without_stdin(
    runner: "Callable[..., subprocess.CompletedProcess[bytes]]",
) -> "Callable[..., subprocess.CompletedProcess[bytes]]":
    """The runner, but what is on our stdin is for the job."""
    import subprocess

    def run(args: Any, /, *, stdin: int | None = None, **options: Any) -> Any:
        return runner(args, stdin=subprocess.DEVNULL if stdin is None else stdin, **options)

    return run
