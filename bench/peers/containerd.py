"""containerd: `ctr image pull`, then `ctr run`, with its overlay snapshotter.

Also the base of peers with a snapshotter in containerd.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from bench.containers.node import CGROUP, EmptyNode
from bench.containers.site import PeersSite
from testbed.packages import Packages

NAMESPACE = "bench"
ADDRESS = "/run/containerd/containerd.sock"
PULL_DEADLINE_S = 300.0
_CONFIG = """version = 2
root = "{root}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images",
  "io.containerd.cri.v1.runtime", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{address}"
"""
_PROXY = """[proxy_plugins.{name}]
  type = "snapshot"
  address = "{address}"
"""


def programs(site: PeersSite, suite: str) -> Path:
    """Return the folder of containerd's programs. Raises: MissingError."""
    return site.packages.unpacked(suite, "containerd") / "usr/bin"


def path(*folders: Path) -> dict[str, str]:
    """Return the environment that finds programs in these folders first."""
    return {"PATH": ":".join([*map(str, folders), os.environ["PATH"]])}


def start_containerd(
    site: PeersSite, node: EmptyNode, suite: str, proxies: Mapping[str, str] | None = None
) -> None:
    """Start containerd with the proxy snapshotters `proxies` (socket by name).

    Raises: RuntimeError if it does not start.
    """
    folder = programs(site, suite)
    config = node.folder / "containerd.toml"
    text = _CONFIG.format(root=node.folder / "containerd", address=ADDRESS)
    for name, address in (proxies or {}).items():
        text += _PROXY.format(name=name, address=address)
    config.write_text(text)
    node.start(
        [str(folder / "containerd"), "--config", str(config), "--log-level", "error"],
        lambda: node.succeeds([str(folder / "ctr"), "version"]),
        path(folder),
    )


def ctr(folder: Path) -> str:
    """Return the client's command line up to its subcommand."""
    return f"{folder / 'ctr'} --namespace {NAMESPACE}"


def pull(site: PeersSite, folder: Path) -> str:
    """Return a line of shell that pulls the image."""
    return f"{ctr(folder)} image pull --plain-http {site.reference()}"


def run(site: PeersSite, folder: Path, *options: str, image: str = "") -> str:
    """Return a line of shell that runs the workload; `image` is by default the site's image."""
    image = image or site.reference()
    words = ["run", "--rm", f"--cgroup=/{CGROUP}/torch", *options, image, "torch"]
    return f"{ctr(folder)} {' '.join(words)} {site.workload.shell_words}"


def shell(*lines: str) -> list[str]:
    """Return one command that runs all lines and prints the output of the last one."""
    *first, last = lines
    return ["sh", "-ec", "\n".join([*(f"{line} >/dev/null" for line in first), last])]


class ContainerdPeer:
    """Release of containerd."""

    def __init__(self, name: str, suite: str) -> None:
        self.name = name
        self.description = "ctr image pull, then ctr run"
        self._suite = suite

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "containerd")

    def prepare(self, site: PeersSite) -> None:
        pass

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        start_containerd(site, node, self._suite)

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        folder = programs(site, self._suite)
        return shell(pull(site, folder), run(site, folder))

    def settle(self, site: PeersSite, node: EmptyNode) -> dict[str, float]:
        return {}


class LocalContainerd(ContainerdPeer):
    """containerd with the image pulled and unpacked before; only the page cache is cold."""

    def __init__(self, name: str, suite: str) -> None:
        super().__init__(name, suite)
        self.description = "ctr run, the image pulled and unpacked before; the page cache is cold"

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        super().start(site, node)
        folder = programs(site, self._suite)
        node.run(shell(pull(site, folder), "true"), timeout_s=PULL_DEADLINE_S)

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        return shell(run(site, programs(site, self._suite)))
