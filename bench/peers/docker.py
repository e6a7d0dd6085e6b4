"""Docker's engine: `docker pull`, then `docker run`, with overlay2."""

from bench.containers.node import CGROUP, Node
from bench.containers.site import Site
from bench.peers.containerd import path, shell
from testbed.packages import Packages

_SOCKET = "unix:///run/docker.sock"


class Docker:
    """One release of the engine, which brings its own containerd up."""

    def __init__(self, name: str, suite: str) -> None:
        self.name = name
        self.description = "docker pull, then docker run"
        self._suite = suite

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "docker.io")
        packages.unpacked(self._suite, "containerd")

    def prepare(self, site: Site) -> None:
        pass

    def start(self, site: Site, node: Node) -> None:
        docker = site.packages.unpacked(self._suite, "docker.io") / "usr"
        containerd = site.packages.unpacked(self._suite, "containerd") / "usr/bin"
        command = [str(docker / "sbin/dockerd"), "--host", _SOCKET, "--log-level", "error"]
        command += ["--data-root", str(node.folder / "docker"), "--exec-root", "/run/docker"]
        command += ["--pidfile", "/run/docker.pid", "--storage-driver", "overlay2"]
        command += ["--bridge", "none", "--iptables=false", "--ip6tables=false"]
        node.start(
            command,
            lambda: node.succeeds([str(docker / "bin/docker"), "--host", _SOCKET, "version"]),
            path(docker / "sbin", docker / "bin", containerd),
        )

    def launch(self, site: Site, node: Node) -> list[str]:
        docker = f"{site.packages.unpacked(self._suite, 'docker.io') / 'usr/bin/docker'}"
        client = f"{docker} --host {_SOCKET}"
        options = f"--rm --network none --cgroup-parent {CGROUP}"
        run = f"run {options} {site.reference()} {site.workload.shell_words}"
        return shell(f"{client} pull {site.reference()}", f"{client} {run}")

    def settle(self, site: Site, node: Node) -> dict[str, float]:
        return {}
