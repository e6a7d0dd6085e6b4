"""The process behind one mounted checkpoint tree: `python -m bootseer.fuse.striped.mounted.server`.

Its way to its plan, a line of JSON on standard input; then it is `life.serve`'s. Servers that run
now become this module when they are told to go on with newer code (`--resume`): it keeps its name.
"""

import logging
import sys

from bootseer.base.documents import from_line
from bootseer.errors import EXIT_FAILURE, exit_code_of
from bootseer.fuse.striped.mounted.life.serve import go_on, serve_checkpoints
from bootseer.fuse.striped.mounted.life.spec import CheckpointPlan
from bootseer.served.background import Report
from bootseer.served.life import run_server
from bootseer.served.supervision.hand_over import RESUME


def _serve(line: bytes, report: Report) -> None:
    plan = from_line(line, CheckpointPlan)
    serve_checkpoints(plan.spec, report=report, state_dir=plan.state_dir)


def main() -> int:
    """Return the exit code: 0 after an unmount, 1 where files were still being written."""
    if sys.argv[1] != RESUME:
        return run_server("the mount's server", _serve)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        unwritten = go_on(int(sys.argv[2]))
    except Exception as error:
        logging.getLogger(__name__).exception("the mount ended")
        return exit_code_of(error)
    # Of a mount in the foreground, whose exit code somebody reads.
    for path in unwritten:
        logging.getLogger(__name__).warning(
            "%s was still being written: nothing of it is kept", path
        )
    return EXIT_FAILURE if unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
