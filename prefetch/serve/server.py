"""The process behind a mounted tree: `python -m bootseer.prefetch.serve.server`, an image's or an
environment's. How it is begun (`begin_tree_server`), and its way to its plan (`main`), a line of
JSON; then it is `serve_image`'s. Light: the program that starts one waits for what is loaded here.
"""

import os
import sys

from bootseer.served.background import Report, ServerProcess, begin_early, begin_server, write_to
from bootseer.settings.config import Settings

_MODULE = "bootseer.prefetch.serve.server"
_WHAT = "the image's server"


def begin_tree_server(
    settings: Settings, *, identity: str | None = None, forks: bool = False
) -> ServerProcess:
    """Begin a process that will serve a tree. See `begin_server`. Raises: BootseerError."""
    return begin_server(settings.run_dir, _MODULE, _WHAT, identity=identity, forks=forks)


def begin_tree_server_early() -> None:
    """Before this program knows its settings. See `background.begin_early`."""
    begin_early(_MODULE, _load_what_both_need)


def _load_what_both_need() -> None:
    """Once for this process and its copy, which waits for no less than we do: a third of all that
    they load. Anything more would keep the two from loading side by side."""
    import bootseer.prefetch.cache.kept_indexes
    import bootseer.prefetch.serve.start_server  # noqa: F401

    _load_default_store()


def _load_default_store() -> None:
    """Load the store of the default settings: no plan has named one yet, and mostly this is it."""
    from bootseer.store import load_backend

    load_backend(os.environ.get("BOOTSEER_STORE", ""))


def main() -> int:
    """The exit code: 0 after an unmount."""
    _load_default_store()
    # Here, before the plan says what to serve: it takes longest to load.
    from bootseer.base.documents import from_line
    from bootseer.prefetch.serve.serve_image import serve_image
    from bootseer.prefetch.serve.serve_plan import ServePlan
    from bootseer.served.folders import log_path
    from bootseer.served.life import run_server

    def serve(line: bytes, report: Report) -> None:
        plan = from_line(line, ServePlan)
        write_to(log_path(plan.settings.run_dir, plan.state.id))
        # Nothing follows in the input, but it ends only when the tree's index is there.
        serve_image(plan, report, sys.stdin.buffer.read)

    return run_server(_WHAT, serve)


if __name__ == "__main__":
    sys.exit(main())
