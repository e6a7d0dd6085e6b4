"""The process behind a mounted image: `python -m bootseer.prefetch.serve.server`, started by
`mount.mount_image` as `background` has it, with its plan as a line of JSON on standard input.

Owns its way from its first instruction to its plan; then it is `serve_image`'s.
"""

import json
import logging
import os
import sys

from bootseer.errors import BootseerError
from bootseer.prefetch.mounts.serve_plan import plan_from_json
from bootseer.prefetch.mounts.server_process import log_path
from bootseer.served.background import Report, write_to
from bootseer.store import load_backend

_log = logging.getLogger(__name__)


def main() -> int:
    """The exit code: 0 after an unmount."""
    # Nobody has told us the store yet; mostly this is it. A copy of a process has it already.
    load_backend(os.environ.get("BOOTSEER_STORE", ""))
    from bootseer.prefetch.serve.serve_image import serve_image

    words = sys.stdin.buffer.readline()
    if not words:
        # Whoever began us needs no server, or has ended.
        return 0
    document = json.loads(words)
    # The job that replaces whoever started us must not find a child that it never made.
    if os.fork():
        os._exit(0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s serve: %(message)s")
    report = Report(int(sys.argv[1]), "the image's server")
    try:
        plan = plan_from_json(document)
        write_to(log_path(plan.settings, plan.state.id))
        # Nothing follows in the input, but it ends only when the tree's index is there.
        serve_image(plan, report, sys.stdin.buffer.read)
    except BootseerError as error:
        _log.error("%s", error)
        report.send_error(error)
        return 1
    except Exception as error:
        _log.exception("the server failed")
        report.send_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
