"""`bootseer snapshotter`: the proxy snapshotter for containerd."""

import contextlib
import os
from pathlib import Path

import click

from bootseer.base.redact import redact
from bootseer.cli.output import Seconds, current_config, current_settings, say
from bootseer.errors import NotFoundError, UnsupportedError
from bootseer.settings.config import variable_of


@click.command(epilog="Example: bootseer --store hdfs://namenode:8020/bootseer snapshotter")
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    default=Path("/run/bootseer/snapshotter.sock"),
    show_default=True,
    help="The socket that containerd's configuration names.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    # Where containerd itself would keep it, and where CRI tells a kubelet to look.
    default=Path("/var/lib/containerd/io.containerd.snapshotter.v1.bootseer"),
    show_default=True,
    help="Where containers' writes and ordinary layers are kept; not on an overlay.",
)
@click.option(
    "--content",
    type=click.Path(path_type=Path),
    help="Where containerd keeps what it pulls; default: beside --root. What it had to pull is "
    "indexed from there.",
)
@click.option(
    "--linger",
    "linger_s",
    type=Seconds(0, 86_400),
    default=60.0,
    show_default=True,
    help="How long an image stays mounted after its last container.",
)
@click.option(
    "--containerd",
    type=click.Path(path_type=Path),
    metavar="SOCKET",
    help="Where containerd answers, which is asked for the pods of containers: the mount of an "
    "image is then a stage of theirs in `bootseer report`. Default: nobody is asked.",
)
@click.option("--check", is_flag=True, help="Ask the snapshotter that runs whether it answers.")
def snapshotter(
    address: Path,
    root: Path,
    content: Path | None,
    linger_s: float,
    containerd: Path | None,
    check: bool,
) -> None:
    """Serve images of the store to containerd, without pulling them.

    Runs until it is told to end; containers and their mounts stay. docs/containerd.md has
    containerd's configuration.
    """
    try:
        from bootseer.linux.grpc_service import ask, serve
        from bootseer.prefetch.snapshotter.service import handler_of
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the snapshotter needs the Python module {error.name}: pip install "
            "'bootseer[containerd]'"
        ) from error
    if check:
        from bootseer.prefetch.snapshotter.wire import MESSAGES, SERVICE

        question = MESSAGES["StatSnapshotRequest"](key="none")
        with contextlib.suppress(NotFoundError):
            ask(address, f"/{SERVICE}/Stat", question, MESSAGES["StatSnapshotResponse"])
        return
    from bootseer.prefetch.snapshotter.core import Snapshotter
    from bootseer.prefetch.snapshotter.pulled import CONTENT_FOLDER

    if os.geteuid() != 0:
        raise UnsupportedError("a snapshotter mounts for containerd and needs root")
    settings = current_settings()
    for name, text in current_config().overridden.items():
        # A service that a shell's variable has moved elsewhere is hard to find.
        say(f"warning: {variable_of(name)} is stronger than {name} = {redact(text)!r} of the file")
    root = root.absolute()
    content = content.absolute() if content else root.parent / CONTENT_FOLDER
    image_mounts = None
    if containerd is not None:
        from bootseer.kubernetes.pod_stages import ImageMountStages

        image_mounts = ImageMountStages(settings, containerd.absolute())
    core = Snapshotter(
        settings,
        root,
        content,
        linger_s=linger_s,
        on_mount=image_mounts.add if image_mounts else None,
    )

    def start() -> None:
        if image_mounts:
            image_mounts.start()
        core.start()
        click.echo(f"serving on {address}", err=True)

    try:
        serve([handler_of(core)], [address], start)
    finally:
        core.close()
