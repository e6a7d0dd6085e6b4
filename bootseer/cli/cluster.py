"""`bootseer snapshotter` and `kubernetes`: services of nodes and clusters."""

import contextlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.base.redact import public_url, redact
from bootseer.cli.command_tree import (
    command,
    current_config,
    current_settings,
    settings_without_fanout,
)
from bootseer.cli.options import options, time_option
from bootseer.cli.text import print_stderr, say
from bootseer.errors import NotFoundError, UnavailableError, UnsupportedError
from bootseer.settings.config import variable_of

if TYPE_CHECKING:
    from bootseer.kubernetes.containerd_config import InstallChange
    from bootseer.kubernetes.containerd_process import ContainerdDaemon

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _needs(what: str, error: ModuleNotFoundError, extra: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} needs the Python module {error.name}: pip install 'bootseer[{extra}]'"
    )


# ---- snapshotter ------------------------------------------------------------------------------


@command(
    "snapshotter", epilog="Example: bootseer --store hdfs://namenode:8020/bootseer snapshotter"
)
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    default=Path("/run/bootseer/snapshotter.sock"),
    show_default=True,
    help="Socket of the snapshotter, as in containerd's configuration.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    # The folder that containerd gives its own snapshotters, and that CRI reports to a kubelet.
    default=Path("/var/lib/containerd/io.containerd.snapshotter.v1.bootseer"),
    show_default=True,
    help="Folder of containers' writes and ordinary layers; not on an overlay.",
)
@click.option(
    "--content",
    type=click.Path(path_type=Path),
    help="Content store of containerd, whose pulled images are indexed; default: beside --root.",
)
@time_option(
    "--linger",
    "linger_s",
    default_s=60.0,
    help="Time for which an image stays mounted after its last container.",
)
@click.option(
    "--containerd",
    type=click.Path(path_type=Path),
    metavar="SOCKET",
    help="Socket of containerd, which names the pods of containers: then `bootseer report` shows "
    "the mount of an image as a stage of its pod. Default: no such stages.",
)
@click.option("--check", is_flag=True, help="Exit with 0 if the running snapshotter answers.")
def snapshotter(
    address: Path,
    root: Path,
    content: Path | None,
    linger_s: float,
    containerd: Path | None,
    check: bool,
) -> None:
    """Serve images of the store to containerd, without pulling them.

    Runs until SIGTERM; containers and their mounts stay. docs/containerd.md has
    containerd's configuration.
    """
    try:
        from bootseer.linux.grpc_service import ask, serve
        from bootseer.prefetch.snapshotter.service import handler_of
    except ModuleNotFoundError as error:
        raise _needs("the snapshotter", error, "containerd") from error
    if check:
        from bootseer.prefetch.snapshotter.service import MESSAGES, SERVICE

        question = MESSAGES["StatSnapshotRequest"](key="none")
        with contextlib.suppress(NotFoundError):
            ask(address, f"/{SERVICE}/Stat", question, MESSAGES["StatSnapshotResponse"])
        return
    from bootseer.prefetch.snapshotter.core import Snapshotter
    from bootseer.prefetch.snapshotter.pulled import CONTENT_FOLDER

    if os.geteuid() != 0:
        raise UnsupportedError("a snapshotter mounts for containerd and needs root")
    # Nobody tells a snapshotter which nodes start the same job.
    settings = settings_without_fanout()
    for name, text in current_config().overridden.items():
        # A variable of a shell may have moved the folders of the service, which others do not find.
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
        print_stderr(f"serving on {address}")

    try:
        serve([handler_of(core)], [address], start)
    finally:
        core.close()


# ---- pods of ours -----------------------------------------------------------------------------

_at_removal = options(
    click.option(
        "--unless-daemonset",
        metavar="NAMESPACE/NAME",
        help="Do nothing while this DaemonSet exists, since the pod is only being replaced.",
    ),
    time_option(
        "--until-unused",
        "patience_s",
        most_s=3600,
        help="Wait until no pod needs this one, at most for this time; for the end of the pod.",
    ),
)
"""Options for the end of a pod."""


@command(
    "kubernetes csi",
    epilog="Example: bootseer kubernetes csi --source hdfs://namenode:8020/checkpoints",
)
@click.option(
    "--kubelet-dir",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet"),
    show_default=True,
    help="Folder of the kubelet; it has the same path in the pod as on the node.",
)
@click.option(
    "--endpoint", type=click.Path(path_type=Path), help="Socket of the driver, in that folder."
)
@click.option(
    "--registration",
    type=click.Path(path_type=Path),
    help="Socket by which the kubelet finds the driver, in that folder.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="URL",
    envvar="BOOTSEER_CSI_SOURCE",
    help="URL below which checkpoint volumes may lie; may be repeated. Default: any remote URL.",
)
@click.option(
    "--fanout-address",
    metavar="ADDRESS",
    default="",
    help="Address at which other nodes reach this one, for volumes of jobs whose nodes feed each "
    "other. Default: none do.",
)
@click.option("--check", is_flag=True, help="Exit with 0 if the running driver answers.")
@_at_removal
def kubernetes_csi(
    kubelet_dir: Path,
    endpoint: Path | None,
    registration: Path | None,
    sources: tuple[str, ...],
    fanout_address: str,
    check: bool,
    patience_s: float | None,
    unless_daemonset: str | None,
) -> None:
    """Serve images, environments and checkpoints as volumes of pods.

    Registers itself with the kubelet. Runs until SIGTERM; volumes and their mounts stay.
    docs/csi.md has the kinds of volumes.
    """
    try:
        from bootseer.linux.grpc_service import ask, serve
    except ModuleNotFoundError as error:
        raise _needs("the driver", error, "kubernetes") from error
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
    driver = Driver(current_settings(), kubelet_dir, sources, fanout_address)

    def start() -> None:
        driver.start()
        print_stderr(f"serving on {endpoint}")

    try:
        serve(handlers_of(driver, endpoint), [endpoint, registration.absolute()], start)
    finally:
        driver.close()


@command("kubernetes spawner", epilog="Example: bootseer kubernetes spawner --grace 60")
@click.option(
    "--address",
    type=click.Path(path_type=Path),
    default=Path("/run/bootseer/spawner.sock"),
    show_default=True,
    help="Socket of the spawner; BOOTSEER_SPAWNER names it for other processes.",
)
@time_option(
    "--grace",
    "grace_s",
    default_s=60.0,
    help="Time for writers of checkpoints to finish after SIGTERM.",
)
@click.option("--check", is_flag=True, help="Exit with 0 if the running spawner answers.")
def kubernetes_spawner(address: Path, grace_s: float, check: bool) -> None:
    """Start the servers of mounts for a snapshotter and a CSI driver, and outlive both.

    A process with the variable BOOTSEER_SPAWNER, which names the socket, uses the spawner. SIGTERM
    ends all servers, those of checkpoints first, and unmounts their mounts.
    """
    if check:
        from bootseer.served.spawner import is_answering

        if not is_answering(address):
            raise UnavailableError(f"no spawner answers on {address}")
        return
    from bootseer.kubernetes.mount_host import Spawner

    if os.geteuid() != 0:
        raise UnsupportedError("servers of mounts for other containers need root")
    service = Spawner(current_settings().run_dir, address, grace_s)
    service.run(lambda: print_stderr(f"starting servers on {address}"))


@command(
    "kubernetes webhook", epilog="Example: bootseer kubernetes webhook --name bootseer-webhook"
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8443,
    show_default=True,
    metavar="N",
    help="Port of the HTTPS server, on all addresses.",
)
@click.option(
    "--namespace",
    metavar="NAME",
    help="Namespace of the webhook. Default: that of the service account.",
)
@click.option(
    "--name",
    default="bootseer-webhook",
    show_default=True,
    metavar="NAME",
    help="Name of the Service, the Secret and the MutatingWebhookConfiguration.",
)
@click.option(
    "--account",
    type=click.Path(path_type=Path),
    help="Folder of a service account, with token, ca.crt and namespace. Default: the pod's own.",
)
def kubernetes_webhook(port: int, namespace: str | None, name: str, account: Path | None) -> None:
    """Turn the annotations of pods into runtime class, volumes and variables.

    Makes a certificate of its own, and registers it with the API server. See
    docs/kubernetes-annotations.md.
    """
    from bootseer.kubernetes.api import ACCOUNT, Api

    try:
        from bootseer.kubernetes.webhook.server import ASK_S, serve
    except ModuleNotFoundError as error:
        raise _needs("the webhook", error, "kubernetes") from error
    api = Api(account or ACCOUNT, ASK_S)
    serve(
        api,
        port=port,
        namespace=namespace or api.namespace,
        name=name,
        store_url=_store_of_pods(),
        on_ready=lambda found: print_stderr(f"serving on port {found}"),
    )


def _store_of_pods() -> str:
    """Return the URL of the store for annotated pods; empty if it is the default store."""
    config = current_config()
    store_url = config.settings.store_url
    if config.sources["store_url"] == "default":
        return ""
    if public_url(store_url) != store_url:
        say(
            f"warning: pods are not told of the store {public_url(store_url)}, since every pod "
            "would show the password or query in its URL"
        )
        return ""
    return store_url


# ---- containerd of a node ---------------------------------------------------------------------

_socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=Path("/run/containerd/containerd.sock"),
    show_default=True,
    help="Socket of containerd.",
)
_restart_option = click.option(
    "--restart",
    metavar="COMMAND",
    default="",
    help="A shell command for the node that restarts containerd, whose process is {pid}. "
    "Default: its systemd unit is restarted.",
)


@command("kubernetes containerd install", epilog="Example: bootseer kubernetes containerd install")
@_socket_option
@_restart_option
def kubernetes_containerd_install(socket: Path, restart: str) -> None:
    """Add the proxy plugin and the runtime class to containerd's configuration.

    containerd is restarted only if it runs without them. Its other settings stay, and the runtime
    class is a copy of its default runtime.
    """
    from bootseer.kubernetes import containerd_config as installer

    machine = platform.machine()
    on = f"linux/{_ARCHITECTURES.get(machine, machine)}"
    _tell_change(
        installer.install(_daemon(socket, restart), _address(), on), "has the lines of bootseer"
    )


@command("kubernetes containerd remove", epilog="Example: bootseer kubernetes containerd remove")
@_at_removal
@_socket_option
@_restart_option
def kubernetes_containerd_remove(
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
        _tell_change(installer.remove(_daemon(socket, restart), _address()), "is as it was")


@command("kubernetes containerd status", epilog="Example: bootseer kubernetes containerd status")
@_socket_option
def kubernetes_containerd_status(socket: Path) -> None:
    """Check that containerd runs with the proxy plugin and the runtime class."""
    plugin, runtime = _daemon(socket, "").loaded()
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


def _tell_change(change: "InstallChange", what: str) -> None:
    changed = "now " if change.is_file_changed else ""
    done = "restarted" if change.is_restarted else "not restarted"
    print_stderr(f"{change.file} {changed}{what}; containerd was {done}")
