"""`bootseer snapshot run`: a set-up command, run once.

`RUN_COMMANDS` are added to the group `snapshot` by `snapshot_commands`.
"""

import signal
import sys

import click

from bootseer.cli.output import Seconds, current_settings, emit_json, json_option
from bootseer.cli.snapshot_output import say


@click.command(
    # Behind its first word everything belongs to the command, "--" or not.
    context_settings={"allow_interspersed_args": False},
    epilog="Example: bootseer snapshot run --target /opt/env -- "
    "sh -c 'python3 -m venv /opt/env && /opt/env/bin/pip install -r requirements.txt'",
)
@click.option(
    "--target",
    "targets",
    metavar="DIR",
    multiple=True,
    help="A directory that the command makes or changes. Without: inferred, and printed.",
)
@click.option(
    "--input",
    "inputs",
    metavar="FILE",
    multiple=True,
    help="A file or directory that decides the result, besides those named in the command.",
)
@click.option(
    "--env",
    "variables",
    metavar="NAME",
    multiple=True,
    help="An environment variable that decides the result.",
)
@click.option("--salt", metavar="TEXT", default="", help="Another salt, another snapshot.")
@click.option("--base", metavar="DIGEST", default="", help="The image. Default: BOOTSEER_IMAGE.")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=Seconds(min=0, max=30 * 86_400),
    default=1800.0,
    show_default=True,
    help="How long to wait for another node or process that runs the same set-up.",
)
@click.argument("command", nargs=-1, required=True)
@json_option
def run(
    targets: tuple[str, ...],
    inputs: tuple[str, ...],
    variables: tuple[str, ...],
    salt: str,
    base: str,
    wait_s: float,
    command: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a set-up COMMAND once; later, and on other nodes, restore what it made.

    Exits with the command's own code when it fails. Trouble with the store only costs the
    restore: the command then runs as usual.
    """
    from bootseer.snapshots.request import Request
    from bootseer.snapshots.run import run_setup

    # As an exception it ends the command and gives the lease back.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    request = Request(
        command=command,
        targets=targets,
        inputs=inputs,
        variables=variables,
        salt=salt,
        base=base,
    )
    result = run_setup(current_settings(), request, report=say, wait_s=wait_s)
    if as_json:
        emit_json(
            {
                "how": result.how,
                "hit": result.hit,
                "fingerprint": result.fingerprint,
                "targets": result.targets,
                "file_count": result.file_count,
                "content_bytes": result.content_bytes,
                "moved_bytes": result.moved_bytes,
                "seconds": result.seconds,
                "setup_seconds": result.setup_seconds,
            }
        )


RUN_COMMANDS = (run,)
