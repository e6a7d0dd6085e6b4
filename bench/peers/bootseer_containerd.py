"""Bootseer's snapshotter in containerd: a pull without layers, then `ctr run`.

The pull is `ctr-remote image rpull`, which, as Kubernetes does, asks the snapshotter for each layer
before fetching it; containerd 1.6's `ctr image pull` fetches first.
"""

from bench.containers.node import EmptyNode
from bench.containers.site import PeersSite
from bench.peers.bootseer_image import Bootseer, ImageMode, settings
from bench.peers.containerd import NAMESPACE, programs, run, shell, start_containerd
from testbed.packages import Packages
from testbed.processes import python_command

_SOCKET = "/run/bootseer/snapshotter.sock"
_CLIENT_SUITE = "bookworm"


class BootseerSnapshotter(Bootseer):
    """Replay of a record through containerd."""

    def __init__(self, name: str, containerd_suite: str) -> None:
        super().__init__(name, ImageMode.REPLAY)
        self.description = "replay by the snapshotter: ctr-remote image rpull, then ctr run"
        self._suite = containerd_suite

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "containerd")
        packages.unpacked(_CLIENT_SUITE, "stargz-snapshotter")

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        environment = {**settings(site, node), "BOOTSEER_WORKLOAD": site.workload.name}
        root = node.folder / "snapshotter"
        command = ["-m", "bootseer", "snapshotter", "--address", _SOCKET, "--root", str(root)]
        node.start(
            python_command(*command),
            lambda: node.succeeds(["test", "-S", _SOCKET]),
            environment,
        )
        start_containerd(site, node, self._suite, {"bootseer": _SOCKET})

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        folder = site.packages.unpacked(_CLIENT_SUITE, "stargz-snapshotter") / "usr/bin"
        client = f"{folder / 'ctr-remote'} --namespace {NAMESPACE}"
        pull = f"{client} image rpull --plain-http --snapshotter bootseer {site.reference()}"
        return shell(pull, run(site, programs(site, self._suite), "--snapshotter=bootseer"))
