"""The group `bootseer kubernetes`; each of its commands is in a module of its own."""

import click

from bootseer.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    elsewhere={
        "containerd": ("kubernetes.containerd_commands", "containerd"),
        "csi": ("kubernetes.csi_command", "csi"),
        "spawner": ("kubernetes.spawner_command", "spawner"),
        "webhook": ("kubernetes.webhook_command", "webhook"),
    },
)
def kubernetes() -> None:
    """What Bootseer's own pods run on a cluster."""
