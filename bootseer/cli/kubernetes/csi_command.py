"""`bootseer kubernetes csi`: the CSI driver."""

import os
from pathlib import Path

import click

from bootseer.cli.kubernetes.kubernetes_commands import at_removal
from bootseer.cli.output import current_settings
from bootseer.errors import UnsupportedError


@click.command(epilog="Example: bootseer kubernetes csi --source hdfs://namenode:8020/checkpoints")
@click.option(
    "--kubelet-dir",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet"),
    show_default=True,
    help="The kubelet's folder, which has the same path in here as on the node.",
)
@click.option(
    "--endpoint", type=click.Path(path_type=Path), help="The driver's socket, in that folder."
)
@click.option(
    "--registration",
    type=click.Path(path_type=Path),
    help="The socket by which the kubelet finds the driver, in that folder.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="URL",
    envvar="BOOTSEER_CSI_SOURCE",
    help="Where checkpoint volumes may lie; may be repeated. Default: any remote URL.",
)
@click.option("--check", is_flag=True, help="Ask the driver that runs whether it answers.")
@at_removal
def csi(
    kubelet_dir: Path,
    endpoint: Path | None,
    registration: Path | None,
    sources: tuple[str, ...],
    check: bool,
    patience_s: float | None,
    unless_daemonset: str | None,
) -> None:
    """Serve images, environments and checkpoints as volumes of pods.

    Registers itself with the kubelet. Runs until it is told to end; volumes and their mounts stay.
    docs/csi.md has the kinds of volumes.
    """
    try:
        from bootseer.linux.grpc_service import ask, serve
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the driver needs the Python module {error.name}: pip install 'bootseer[kubernetes]'"
        ) from error
    from bootseer.kubernetes.csi.driver import NAME, Driver, VolumeRecords
    from bootseer.kubernetes.csi.service import IDENTITY, MESSAGES, handlers_of

    kubelet_dir = kubelet_dir.absolute()
    endpoint = (endpoint or kubelet_dir / "plugins" / NAME / "csi.sock").absolute()
    registration = registration or kubelet_dir / "plugins_registry" / f"{NAME}-reg.sock"
    if check:
        ask(endpoint, f"/{IDENTITY}/Probe", MESSAGES["ProbeRequest"](), MESSAGES["ProbeResponse"])
        return
    if patience_s is not None:
        from bootseer.kubernetes.mount_host import await_removal

        records = VolumeRecords(current_settings().run_dir / "volumes")
        await_removal(
            unless_daemonset, "volumes", lambda: any(True for _ in records.all()), patience_s
        )
        return
    if os.geteuid() != 0:
        raise UnsupportedError("a driver mounts for a kubelet and needs root")
    driver = Driver(current_settings(), kubelet_dir, sources)

    def start() -> None:
        driver.start()
        click.echo(f"serving on {endpoint}", err=True)

    try:
        serve(handlers_of(driver, endpoint), [endpoint, registration.absolute()], start)
    finally:
        driver.close()
