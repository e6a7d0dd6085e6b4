"""Process behind a linked snapshot or a job's own view, started by `mounted.hold`.

It keeps the node's extracted tree, if there is one, for as long as an overlay shows it, and removes
what was written when the overlay is gone.
"""

import contextlib
import signal
import sys
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.errors import from_oserror
from bootseer.linux.processes import ProcessId
from bootseer.served.processes import HOLDER, Report, serve
from bootseer.served.service import ServiceState, hold_folder
from bootseer.served.users import wait_until_unmounted
from bootseer.settings.config import Settings
from bootseer.snapshots.node_trees import NodeTrees


class HolderPlan(Struct, frozen=True):
    """Plan of a holder: a line of JSON on its standard input."""

    settings: Settings
    state: ServiceState
    state_dir: Path
    launcher: ProcessId
    """The process that makes the overlay."""


def _hold(line: bytes, report: Report) -> None:
    plan = from_line(line, HolderPlan)
    # As an exception it cleans up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # Before it hears that we are ready: it may have finished and be gone a moment later.
        launcher = plan.launcher.open()
    except OSError as error:
        raise from_oserror(error, f"watch process {plan.launcher.pid}") from error
    digest = plan.state.index_digest
    with (
        hold_folder(plan.state_dir, plan.state),
        NodeTrees(plan.settings).held(digest) if digest else contextlib.nullcontext(),
    ):
        if report.ready():
            wait_until_unmounted(plan.state_dir, launcher)


def main() -> int:
    """The exit code: 0 after the overlay is off."""
    return serve(HOLDER, _hold)


if __name__ == "__main__":
    sys.exit(main())
