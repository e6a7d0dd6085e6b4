"""The process behind a mounted tree: `python -m bootseer.prefetch.serve.server`, an image's or an
environment's. What it loads until it has its plan; then it is `serve_image`'s.
"""

import os
import sys

from bootseer.served.processes import TREE, Report, serve


def _load() -> None:
    """Load what takes longest before the plan says what to serve."""
    from bootseer.store import load_backend

    # No plan has named one yet, and mostly this is it.
    load_backend(os.environ.get("BOOTSEER_STORE", ""))
    import bootseer.prefetch.serve.serve_image
    import bootseer.prefetch.serve.serve_plan  # noqa: F401


def _serve(line: bytes, report: Report) -> None:
    from bootseer.base.documents import from_line
    from bootseer.prefetch.serve.serve_image import serve_image
    from bootseer.prefetch.serve.serve_plan import ServePlan

    # Nothing follows in the input, but it ends only when the tree's index is there.
    serve_image(from_line(line, ServePlan), report, sys.stdin.buffer.read)


def main() -> int:
    """The exit code: 0 after an unmount."""
    return serve(TREE, _serve, _load)


if __name__ == "__main__":
    sys.exit(main())
