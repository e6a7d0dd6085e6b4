"""`bootseer kubernetes spawner`: the process under which the servers of mounts live."""

import os
from pathlib import Path

import click

from bootseer.cli.output import Seconds, current_settings
from bootseer.errors import UnavailableError, UnsupportedError


@click.command(epilog="Example: bootseer kubernetes spawner --grace 60")
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    default=Path("/run/bootseer/spawner.sock"),
    show_default=True,
    help="The socket that BOOTSEER_SPAWNER names elsewhere.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(0, 86_400),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="What writers of checkpoints have when it is told to end.",
)
@click.option("--check", is_flag=True, help="Ask the one that runs whether it answers.")
def spawner(address: Path, grace_s: float, check: bool) -> None:
    """Start the servers of mounts for a snapshotter and a CSI driver, and outlive both.

    They ask it where BOOTSEER_SPAWNER is its socket. SIGTERM ends all servers, those of checkpoints
    first, and takes off what they have mounted.
    """
    if check:
        from bootseer.served.spawner import answers

        if not answers(address):
            raise UnavailableError(f"no spawner answers on {address}")
        return
    from bootseer.kubernetes.mount_host import Spawner

    if os.geteuid() != 0:
        raise UnsupportedError("servers of mounts for other containers need root")
    service = Spawner(current_settings().run_dir, address, grace_s)
    service.run(lambda: click.echo(f"starting servers on {address}", err=True))
