"""Process behind a linked snapshot or a job's own view, started by `mounting.hold`.

The process holds the node's extracted tree, if there is one, while an overlay shows it. When the
overlay is gone, it removes the files that were written.
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
    """Process that mounts the overlay."""


def _hold(line: bytes, report: Report) -> None:
    plan = from_line(line, HolderPlan)
    # SystemExit runs the clean-up of the `with` statement.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # Before the report: the launcher may end right after it.
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
    """Hold until the overlay is unmounted; return the exit code."""
    return serve(HOLDER, _hold)


if __name__ == "__main__":
    sys.exit(main())
