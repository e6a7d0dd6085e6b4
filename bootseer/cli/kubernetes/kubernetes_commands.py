"""The group `bootseer kubernetes`; each of its commands is in a module of its own."""

from collections.abc import Callable
from typing import Any

import click

from bootseer.cli.lazy_group import LazyGroup
from bootseer.cli.output import Seconds


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


def at_removal(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of what a pod does at its end."""
    for option in (
        click.option(
            "--until-unused",
            "patience_s",
            type=Seconds(0, 3600),
            metavar="TIME",
            help="At the end of this pod: wait so long, at most, for the end of pods that need it.",
        ),
        click.option(
            "--unless-daemonset",
            metavar="NAMESPACE/NAME",
            help="Do nothing while the API server knows this DaemonSet: the pod is only replaced.",
        ),
    ):
        command = option(command)
    return command
