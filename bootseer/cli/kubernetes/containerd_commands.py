"""`bootseer kubernetes containerd`: containerd's own configuration on the node of a pod."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.kubernetes.kubernetes_commands import at_removal
from bootseer.cli.output import current_settings
from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from bootseer.kubernetes.containerd_config import InstallChange
    from bootseer.kubernetes.containerd_process import ContainerdDaemon

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@click.group()
def containerd() -> None:
    """Have the containerd of a node know the snapshotter and the runtime class."""


def _of_containerd(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--restart",
            metavar="COMMAND",
            default="",
            help="A shell command for the node that restarts containerd, whose process is {pid}. "
            "Default: its systemd unit is restarted.",
        ),
        click.option(
            "--socket",
            type=click.Path(path_type=Path),
            default=Path("/run/containerd/containerd.sock"),
            show_default=True,
            help="Where containerd answers.",
        ),
    ):
        command = option(command)
    return command


@containerd.command(epilog="Example: bootseer kubernetes containerd install")
@_of_containerd
def install(socket: Path, restart: str) -> None:
    """Add the proxy plugin and the runtime class to containerd's configuration.

    containerd is restarted only where it runs without them. What it had is left as it is, and the
    runtime class is a copy of its default runtime.
    """
    from bootseer.kubernetes import containerd_config as installer

    machine = platform.machine()
    on = f"linux/{_ARCHITECTURES.get(machine, machine)}"
    _say(installer.install(_daemon(socket, restart), _address(), on), "has the lines of bootseer")


@containerd.command(epilog="Example: bootseer kubernetes containerd remove")
@at_removal
@_of_containerd
def remove(
    socket: Path, restart: str, unless_daemonset: str | None, patience_s: float | None
) -> None:
    """Take away what `install` has added, to the byte, and have containerd forget it."""
    from bootseer.kubernetes import containerd_config as installer
    from bootseer.kubernetes.containerd import runtime_handlers
    from bootseer.kubernetes.containerd_process import NAME
    from bootseer.kubernetes.mount_host import await_removal

    def has_pods() -> bool:
        return NAME in runtime_handlers(socket)

    if await_removal(unless_daemonset, "pods of the runtime class", has_pods, patience_s or 0.0):
        _say(installer.remove(_daemon(socket, restart), _address()), "is as it was")


@containerd.command(epilog="Example: bootseer kubernetes containerd status")
@_of_containerd
def status(socket: Path, restart: str) -> None:
    """Whether containerd runs with the proxy plugin and the runtime class."""
    plugin, runtime = _daemon(socket, restart).loaded()
    if plugin != _address() or not runtime:
        raise NotFoundError(
            "containerd runs without the proxy plugin or the runtime class of bootseer: run "
            "`bootseer kubernetes containerd install`"
        )
    click.echo(f"containerd runs with the snapshotter at {plugin}")


def _daemon(socket: Path, restart: str) -> "ContainerdDaemon":
    from bootseer.kubernetes.containerd_process import ContainerdDaemon

    return ContainerdDaemon(socket, restart)


def _address() -> str:
    return str(current_settings().run_dir / "snapshotter.sock")


def _say(change: "InstallChange", what: str) -> None:
    changed = "now " if change.is_file_changed else ""
    done = "restarted" if change.is_restarted else "not restarted"
    click.echo(f"{change.file} {changed}{what}; containerd was {done}", err=True)
