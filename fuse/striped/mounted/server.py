"""The process behind one mounted checkpoint tree: `python -m bootseer.fuse.striped.mounted.server`.

Its way to its plan, a line of JSON on standard input; then it is `life.serve`'s. Servers that run
now become this module when they are told to go on with newer code (`--resume`): it keeps its name.
"""

import logging
import sys

from bootseer.base.documents import from_line
from bootseer.errors import exit_code_of
from bootseer.fuse.striped.mounted.life.serve import go_on, serve_checkpoints
from bootseer.fuse.striped.mounted.life.spec import CheckpointPlan
from bootseer.served.background import Report
from bootseer.served.life import run_server
from bootseer.served.supervision.hand_over import RESUME


def _serve(line: bytes, report: Report) -> None:
    plan = from_line(line, CheckpointPlan)
    serve_checkpoints(plan.spec, report=report, state_dir=plan.state_dir)


def main() -> int:
    """The exit code: 0 after an unmount."""
    if sys.argv[1] != RESUME:
        return run_server("the mount's server", _serve)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        go_on(int(sys.argv[2]))
    except Exception as error:
        logging.getLogger(__name__).exception("the mount ended")
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
