"""Process of a node in the fan-out of volumes: `python -m bootseer.kubernetes.csi.fanout_host`.

It is `fanout.host` with another timeline: the stage "fan-out" is written beside the stages of the
volumes and published, since the pod's own processes know nothing of the fan-out.
"""

import itertools
import sys
from collections.abc import Mapping

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.fanout.host import HostPlan, take_part
from bootseer.kubernetes.pod_stages import PodStart, pod_timeline, wait_published
from bootseer.served.processes import VOLUMES_FANOUT, Report, serve
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import Value

_PUBLISHED_S = 60.0


class VolumeFanoutPlan(Struct, frozen=True):
    """Plan of the process, as the CSI driver sends it."""

    host: HostPlan
    settings: Settings
    """Settings of the node; those in `host` name the fan-out's start, which has no timelines."""
    start: PodStart
    """The pod whose volume began the fan-out on this node; its start has the stage."""


def main() -> int:
    """Return the exit code: 0 at its end."""
    return serve(VOLUMES_FANOUT, _host)


def _host(line: bytes, report: Report) -> None:
    """Take part as the plan in `line` says. Raises: BootseerError, OSError."""
    plan = from_line(line, VolumeFanoutPlan)

    # A later file of the same part would take the place of an earlier one.
    numbers = itertools.count()

    def write(at_ns: int, attributes: Mapping[str, Value]) -> None:
        part = f"fan-out {next(numbers)}"
        with pod_timeline(plan.settings, plan.start, part) as timeline:
            if timeline is not None:
                timeline.note("fan-out", at_ns, 0, attributes)

    try:
        take_part(plan.host, report, write)
    finally:
        wait_published(_PUBLISHED_S)


if __name__ == "__main__":
    sys.exit(main())
